"""Run a model whose weights do not fit in memory: decoder layers are loaded one by one, from the checkpoint as published."""

from .deferred_loading import load_streamed
from .host_states import in_host_memory
from .layer_store import LayerStore
from .layer_sweep import Aside, LayerSweep
from .memory_needs import StreamedNeeds

__all__ = ["Aside", "LayerStore", "LayerSweep", "StreamedNeeds", "in_host_memory", "load_streamed"]
