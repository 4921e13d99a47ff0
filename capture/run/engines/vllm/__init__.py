"""vLLM as the engine of a run (extra `vllm`): its own hidden-state extraction, through a connector of ours, into our rows."""

from .backend import KIND, VllmBackend
from .engine import VllmEngine
from .refusals import require_vllm_can

__all__ = ["KIND", "VllmBackend", "VllmEngine", "require_vllm_can"]
