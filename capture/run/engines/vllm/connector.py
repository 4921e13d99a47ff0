"""The class that vLLM loads to hand its hidden states over; imported by vLLM alone, by the name of this module.

vLLM makes it twice: beside its scheduler, where it says which rows a step makes, and in each worker, where the first one
copies them out of the cache when the step is done. It runs on any device and writes no file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from .....models.errors import RunError
from .arena import ArenaShape, RowArena
from .pieces import StepPiece, StepPieces, write_pieces

# The list of layers, in vLLM's model for this, that hold the one that keeps hidden states.
_KEEPER = "cache_only_layers"


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM's types are not looked at
    """Metadata of one step, from the scheduler to the workers."""

    pieces: tuple[StepPiece, ...]


class RowConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Copies the hidden states of each step into the arena that its configuration names. It loads nothing."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        group, self._layer = hidden_state_group(kv_cache_config)
        self._steps = StepPieces(group)
        self._cache: Tensor | None = None
        self._arena: RowArena | None = None
        if role is KVConnectorRole.WORKER and get_tensor_model_parallel_rank() == 0:
            extra = vllm_config.kv_transfer_config.kv_connector_extra_config
            self._arena = RowArena.at(extra["arena"], ArenaShape(**extra["shape"]))

    # Beside the scheduler.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:  # noqa: ARG002
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing is loaded, so nothing is to be noted."""

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        return StepMetadata(self._steps.of_step(scheduler_output))

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:  # noqa: ARG002
        """Free the blocks at once: the rows left with the step that made them."""
        self._steps.forget(request.request_id)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Do the same as `request_finished`, for a model with several kinds of caches."""
        return self.request_finished(request, block_ids)

    # In a worker.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self._cache = kv_caches[self._layer]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: the states are in the cache and leave it when the step is done."""

    def wait_for_save(self) -> None:
        if self._arena is None or self._cache is None:
            return
        write_pieces(self._get_connector_metadata().pieces, self._cache, self._arena)


def hidden_state_group(kv_cache_config: Any) -> tuple[int, str]:
    """Return the index of vLLM's cache group of hidden states, and the name of the layer that only keeps them.

    Raises:
        RunError: there is not one such layer.
    """
    groups = kv_cache_config.kv_cache_groups
    found = [(i, name) for i, group in enumerate(groups) for name in group.layer_names if _KEEPER in name.split(".")]
    if len(found) != 1:
        raise RunError(
            f"vLLM has {len(found)} layers that keep hidden states in the {len(groups)} groups of its caches; expected one. This "
            "version of vLLM names them otherwise than those that were tried (0.32)."
        )
    return found[0]
