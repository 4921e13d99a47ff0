"""The class that vLLM loads to hand its hidden states over; imported by vLLM alone, by the name of this module.

vLLM makes it twice: beside its scheduler, where it says which rows a step makes, and in each worker, where the first one
copies them out of the cache when the step is done. It runs on any device and writes no file.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

from ....models.errors import RunError
from .arena import ArenaShape, RowArena
from .pieces import Piece, pieces_of, write_pieces


@dataclass
class StepPieces(KVConnectorMetadata):  # type: ignore[misc]  # vLLM's types are not looked at
    """What the scheduler tells the workers of one step."""

    pieces: tuple[Piece, ...]


class RowConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Copies the hidden states of each step into the arena that its configuration names. It loads nothing."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._group, self._layer = hidden_state_group(kv_cache_config)
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

    def build_connector_meta(self, scheduler_output: Any) -> StepPieces:
        scheduled: Mapping[str, int] = scheduler_output.num_scheduled_tokens
        return StepPieces(pieces_of(scheduler_output.scheduled_new_reqs, scheduled, self._group))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:  # noqa: ARG002
        """The rows left with the step that made them, so the blocks are free at once."""
        return False, None

    # In a worker.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self._cache = kv_caches[self._layer]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """The states are in the cache by then; they leave it when the step is done."""

    def wait_for_save(self) -> None:
        if self._arena is None or self._cache is None:
            return
        write_pieces(self._get_connector_metadata().pieces, self._cache, self._arena)


def hidden_state_group(kv_cache_config: Any) -> tuple[int, str]:
    """Which group of vLLM's caches is that of the hidden states, and the name of its only layer.

    Raises:
        RunError: no group holds that one layer alone.
    """
    groups = kv_cache_config.kv_cache_groups
    found = [
        (i, group.layer_names[0])
        for i, group in enumerate(groups)
        if isinstance(group.kv_cache_spec, HiddenStateCacheSpec) and len(group.layer_names) == 1
    ]
    if len(found) != 1:
        told = ", ".join(f"{type(group.kv_cache_spec).__name__} x {len(group.layer_names)}" for group in groups)
        raise RunError(f"vLLM keeps hidden states of this model in no cache of their own; its caches are {told}.")
    return found[0]
