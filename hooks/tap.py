"""`tap(...)`: hidden states of single forwards, for as long as a `with` block lasts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..models.call import cache_in, without_cache
from ..models.config import model_config
from ..models.errors import UsageError, UsageTypeError
from ..models.images import own_expansion
from ..models.layer_choice import LayerChoice
from ..models.layer_ids import Convention
from ..models.modules import is_sharded
from .positions import Held, PositionsError, RealPositions, lone_pad_id, real_before, real_positions
from .slots import ClonedStates
from .tapped_model import TappedModel
from .taps import Final


@dataclass(frozen=True)
class Captured:
    """States of one forward.

    Attributes:
        aux_hidden_states: K tensors (B, S, H) in the order of the layer ids, in the model's dtype and memory of their own.
            Rows of padding hold whatever the model computed there; `rows` leaves them out. S counts the expanded ids where the
            model itself puts several image features in the place of one placeholder.
        pre_norm: (B, S, H), or None if not asked for.
        post_norm: (B, S, H), or None if not asked for.
        output: the model's own output, or None where the forward was stopped after its last tap.
        positions: which positions of the batch are real.
    """

    aux_hidden_states: tuple[Tensor, ...]
    pre_norm: Tensor | None
    post_norm: Tensor | None
    output: Any
    positions: RealPositions

    def rows(self) -> Tensor:
        """Return (T, K, H): the real rows alone, batch row after batch row."""
        index = self.positions.flat_index()
        flat = [state.reshape(-1, state.shape[-1]) for state in self.aux_hidden_states]
        rows = [state.index_select(0, index.to(state.device)) for state in flat]
        return torch.stack([row.to(rows[0].device) for row in rows], 1)


class ActiveTap:
    """Taps that are attached; made by `tap`."""

    def __init__(self, tapped: TappedModel, *, stop_early: bool | None) -> None:
        self._model, self._collector, self._company = tapped.model, tapped.collector, tapped.company
        self._vocab_rows, self._stop_early = tapped.decoder.vocab_rows, stop_early

    def run(
        self,
        input_ids: Tensor | None = None,
        *,
        lengths: Sequence[int] | Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Captured:
        """Return one forward of the model.

        Args:
            input_ids: (B, S) int64; or give `inputs_embeds` (B, S, H) among `kwargs`.
            lengths: (B,) real tokens of each row, padded on the right. The model is given no mask for them: causality alone
                makes the real rows exact.
            attention_mask: (B, S) of 0 and 1, padded on either side; it is passed on to the model. Behind a cache that holds
                positions already: (B, held + S), or as wide as a static cache. Where a row is padded on the left and the
                model needs position ids counted from the mask, they are added unless `kwargs` have them.
            kwargs: passed on to the model. No KV cache is built unless `use_cache=True` or a cache is among them.

        Raises:
            PositionsError: lengths or a mask that do not fit, a mask with a hole, or padding that nothing tells apart.
            UsageTypeError: input_ids that are no int64 or int32.
            UsageError: an empty batch, ids on the CPU that the vocabulary does not have, or a KV cache together with
                `stop_early=True`.
            TapError: a tap did not fire exactly once with one (B, S, H) tensor, or rows of this model depend on their company
                when it is run so (tried once, before the first padded call).
        """
        cache = cache_in(kwargs)
        cached = bool(kwargs.get("use_cache")) or cache is not None
        if self._stop_early and cached:
            raise UsageError(
                "a KV cache and early stop cannot go together: the layers after the last tap would be missing from the cache. "
                "Leave stop_early at None, or make it False."
            )
        shape = _batch_shape(input_ids, kwargs)
        if input_ids is not None and not any(isinstance(value, Tensor) for value in kwargs.values()):
            _require_in_vocabulary(input_ids, self._vocab_rows)
        config = model_config(self._model)
        pad = lone_pad_id(config)
        held = _held(cache, attention_mask)
        positions = real_positions(
            input_ids, *shape, lengths=lengths, attention_mask=attention_mask, lone_pad_id=pad, held=held
        )
        expansion = own_expansion(config, input_ids, kwargs)
        if expansion is not None:
            positions = positions.expanded(expansion)
            shape = positions.B, positions.S
        before = real_before(attention_mask, held.positions, positions.B)
        kwargs |= self._company.arguments_for(positions, kwargs, attention_mask, held.positions, before)
        if attention_mask is not None:
            kwargs["attention_mask"] = attention_mask
        stop = self._stop_early is not False and not cached
        given = kwargs if cached else without_cache(self._model) | kwargs
        # By position: a model of somebody's own may call its token ids otherwise.
        return self._forward(shape, positions, () if input_ids is None else (input_ids,), given, stop)

    def _forward(
        self,
        shape: tuple[int, int],
        positions: RealPositions,
        args: tuple[Tensor, ...],
        kwargs: dict[str, Any],
        stop: bool,
    ) -> Captured:
        taps = self._collector.taps
        slots = ClonedStates(len(taps.names))
        output = None
        with self._collector.armed(slots, *shape, stop=stop):
            output = self._model(*args, **kwargs)
        states = [state for state in slots.states if state is not None]
        K = len(taps.boundaries)
        return Captured(
            aux_hidden_states=tuple(states[:K]),
            pre_norm=states[K] if taps.pre_norm else None,
            post_norm=states[-1] if taps.post_norm else None,
            output=output,
            positions=positions,
        )


@contextmanager
def tap(
    model: nn.Module,
    layer_ids: Sequence[int],
    convention: Convention = "layer_output",
    final: Final = "none",
    stop_early: bool | None = None,
    adapter: str | None = None,
) -> Iterator[ActiveTap]:
    """Attach taps to `model` for the length of a `with` block; restore the model afterwards.

    Runs the model over ten tokens on entering, to prove each tap: see `hooks.truth`.

    Args:
        model: a causal language model of transformers.
        layer_ids: strictly increasing ids under `convention`.
        convention: ``layer_output`` (id k = output of 0-based layer k) or ``boundary`` (id k = after k layers).
        final: norm states to take too: ``none``, ``pre`` (before the final norm), ``post`` (after it) or ``both``.
        stop_early: end each forward when every tap has fired. None does so unless a KV cache is being filled;
            False runs the whole model, so that `Captured.output` is there.
        adapter: how the residual stream is read where it is not plain; see `models.adapters`.

    Raises:
        LayerIdError, LayerIdTypeError: ids that name no layers.
        DecoderNotFoundError: the decoder layers cannot be found.
        AdapterError: no adapter has that name, or the layers have not the structure that it reads.
        TapError: a layer's output is not the next one's input, or there is no final norm to tap.

    Example:
        >>> with tap(model, [0, 2]) as tapped:
        ...     captured = tapped.run(torch.tensor([[5, 6, 7], [8, 9, 0]]), lengths=[3, 2])
        >>> [tuple(states.shape) for states in captured.aux_hidden_states], captured.rows().shape
        ([(2, 3, 32), (2, 3, 32)], torch.Size([5, 2, 32]))
    """
    if stop_early and final != "none":
        raise UsageError(
            f"stop_early=True ends the forward before the final norm, but final={final!r} asks for its states."
        )
    tapped = TappedModel.of(model, LayerChoice(layer_ids, convention), final, adapter=adapter)
    with tapped.attached():
        if is_sharded(model):
            tapped.company.try_every_way()
        yield ActiveTap(tapped, stop_early=stop_early)


def _held(cache: Any, mask: Any) -> Held:
    """Return how many positions `cache` holds; an unknown number matters only to a mask, whose columns it shifts."""
    try:
        return Held.by(cache)
    except (PositionsError, ValueError):
        if mask is not None:
            raise
        return Held()


def _batch_shape(input_ids: Tensor | None, kwargs: dict[str, Any]) -> tuple[int, int]:
    source = input_ids if input_ids is not None else kwargs.get("inputs_embeds")
    if not isinstance(source, Tensor) or source.ndim < 2:
        raise UsageError("expected input_ids (B, S), or inputs_embeds (B, S, H).")
    if input_ids is not None and input_ids.dtype not in (torch.int64, torch.int32):
        raise UsageTypeError(
            f"expected input_ids of dtype int64; got {input_ids.dtype}. Convert token ids with .long(); pass embeddings as "
            "inputs_embeds."
        )
    if not source.shape[0] or not source.shape[1]:
        raise UsageError(
            f"expected at least one sequence of at least one token; got a batch of shape {tuple(source.shape)}."
        )
    return int(source.shape[0]), int(source.shape[1])


def _require_in_vocabulary(input_ids: Tensor, vocab_rows: int | None) -> None:
    """Only where the ids are on the CPU: elsewhere, to look at them would make the host wait for the device."""
    if vocab_rows is None or input_ids.device.type != "cpu":
        return
    lowest, highest = (int(edge) for edge in input_ids.aminmax())
    if lowest < 0 or highest >= vocab_rows:
        wrong = ((input_ids < 0) | (input_ids >= vocab_rows)).nonzero()[0].tolist()
        raise UsageError(
            f"expected token ids within 0..{vocab_rows - 1}, the rows of the model's embedding; found "
            f"{int(input_ids[tuple(wrong)])} at sequence {wrong[0]}, position {wrong[1]}."
        )
