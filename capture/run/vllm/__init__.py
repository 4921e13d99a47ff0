"""vLLM as the engine of a run (extra `vllm`): its own hidden-state extraction, through a connector of ours, into our rows."""

from .backend import VllmBackend
from .engine import VllmEngine
from .options import engine_identity
from .refusals import require_vllm_can

__all__ = ["VllmBackend", "VllmEngine", "engine_identity", "require_vllm_can"]
