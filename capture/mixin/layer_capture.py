"""The taps that a mixin model carries."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from ...hooks import ClonedStates, Collector, Company, Watch, drop_inert_hooks, find_taps, probe
from ...models.call import eagerly
from ...models.decoder import Decoder
from ...models.layer_choice import LayerChoice
from ...models.length_limits import length_limits
from ...models.modules import is_sharded, untraced
from ..outputs import DeviceHiddenStates


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
        self._tapping: _Tapping | None = None
        self._attaching = threading.Lock()
        self._checked = False

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerCapture:
        return LayerCapture(self.layer_ids, self.adapter)

    def __reduce__(self) -> tuple[type[LayerCapture], tuple[list[int], str | None]]:
        return LayerCapture, (self.layer_ids, self.adapter)

    def attach(self, model: nn.Module) -> None:
        """Register the hooks on `model`'s layers, unless they are there; those of a model it was copied from go."""
        with self._attaching:
            if self._tapping is None:
                drop_inert_hooks(model)
                self._tapping = _Tapping.of(model, self.layer_ids, self.adapter)
            self._tapping.collector.attach()

    def detach(self, model: nn.Module) -> None:
        """Remove the hooks from `model`."""
        drop_inert_hooks(model)
        if self._tapping is not None:
            self._tapping.collector.detach()

    @property
    def company(self) -> Company:
        """What is found of rows in company; of a model that the hooks are on."""
        return self._attached.company

    @property
    def trying(self) -> bool:
        """Return whether this thread runs the model to try it: such calls are nobody's."""
        return self._tapping is not None and self._tapping.collector.is_ignoring

    def forward(self, call: Callable[[], Any], B: int, S: int) -> tuple[Any, tuple[Tensor, ...]]:
        """Run one captured call: the model's own output and K states (B, S, H)."""
        slots = ClonedStates(len(self.layer_ids))
        with self._attached.collector.armed(slots, B, S):
            output = call() if self._checked else self._watched(call, B, S)
        return output, tuple(state for state in slots.states if state is not None)

    @property
    def _attached(self) -> _Tapping:
        return cast(_Tapping, self._tapping)

    @untraced("the first captured call is watched, and its hooks must not stay in a graph")
    def _watched(self, call: Callable[[], Any], B: int, S: int) -> Any:
        decoder, boundaries = self._attached.decoder, self._attached.collector.taps.boundaries
        watch = Watch(decoder)
        with watch.watching(), eagerly(decoder.model):
            output = call()
        watch.truth().require(decoder, boundaries)
        if B == S > 1:  # (S, B, H) would look like (B, S, H)
            with self._attached.collector.ignoring():
                probe(decoder).require(decoder, boundaries)
        if is_sharded(decoder.model):
            self.company.try_every_way()
        self._checked = True
        return output


@dataclass(frozen=True)
class _Tapping:
    """The taps of one model."""

    decoder: Decoder
    collector: Collector
    company: Company

    @classmethod
    def of(cls, model: nn.Module, layer_ids: Sequence[int], adapter: str | None) -> _Tapping:
        decoder, taps = find_taps(model, LayerChoice(layer_ids), adapter=adapter)
        collector = Collector(decoder, taps, every_forward=True)
        # The probe has hooks of its own: it runs before a call, and may run inside one.
        company = Company(decoder, Collector(decoder, taps), length_limits(model), collector.ignoring)
        return cls(decoder, collector, company)
