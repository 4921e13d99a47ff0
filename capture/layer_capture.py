"""The taps that a mixin model carries."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor, nn

from ..hooks import ClonedStates, Collector, Taps, Watch, drop_inert_hooks
from ..models.call import eagerly
from ..models.compilation import untraced
from ..models.decoder import Decoder, find_decoder
from .outputs import DeviceHiddenStates


class LayerCapture:
    """Taps on one model; a copy of the model (deepcopy, pickle) carries them on, attached anew.

    Attributes:
        layer_ids: ``layer_output`` ids.
        adapter: the name of the adapter that reads the residual stream, or None.
        last: what the last captured call made.
        cached: how many positions each KV cache holds by captured calls, for caches that cannot tell.
    """

    def __init__(self, layer_ids: Sequence[int], adapter: str | None = None) -> None:
        self.layer_ids, self.adapter = list(layer_ids), adapter
        self.last: DeviceHiddenStates | None = None
        self.cached: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._decoder: Decoder | None = None
        self._collector: Collector | None = None
        self._checked = False

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerCapture:
        return LayerCapture(self.layer_ids, self.adapter)

    def __reduce__(self) -> tuple[type[LayerCapture], tuple[list[int], str | None]]:
        return LayerCapture, (self.layer_ids, self.adapter)

    def attach(self, model: nn.Module) -> None:
        """Register the hooks on `model`'s layers, unless they are there; those of a model it was copied from go."""
        if self._collector is None:
            drop_inert_hooks(model)
            self._decoder = find_decoder(model, adapter=self.adapter)
            self._collector = Collector(self._decoder, Taps(self._boundaries))
        self._collector.attach()

    def detach(self, model: nn.Module) -> None:
        drop_inert_hooks(model)
        if self._collector is not None:
            self._collector.detach()

    def forward(self, call: Callable[[], Any], B: int, S: int) -> tuple[Any, tuple[Tensor, ...]]:
        """One captured call: the model's own output and K states (B, S, H)."""
        decoder, collector = cast(Decoder, self._decoder), cast(Collector, self._collector)
        slots = ClonedStates(len(self.layer_ids))
        with collector.armed(slots, B, S):
            output = call() if self._checked else self._watched(call, decoder)
        return output, tuple(state for state in slots.states if state is not None)

    @property
    def _boundaries(self) -> tuple[int, ...]:
        return tuple(i + 1 for i in self.layer_ids)

    @untraced("the first captured call is watched, and its hooks must not stay in a graph")
    def _watched(self, call: Callable[[], Any], decoder: Decoder) -> Any:
        watch = Watch(decoder)
        with watch.watching(), eagerly(decoder.model):
            output = call()
        watch.truth().require(decoder, self._boundaries)
        self._checked = True
        return output
