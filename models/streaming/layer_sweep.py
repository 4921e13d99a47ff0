"""Run many forwards through one decoder layer before the next is loaded, by pausing each where it enters a layer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import zip_longest
from typing import Any, Generic, TypeVar

from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from ..errors import RunError
from .dry_forward import require_order
from .layer_store import LayerStore

R = TypeVar("R")
Aside = Callable[[int, Sequence[Tensor]], AbstractContextManager[None]]


class LayerSweep:
    """Sweeps of forwards over the layers of one model; the hooks are on its layers while `attached`.

    A forward that runs outside a sweep loads each layer when it enters it and drops it when it leaves it.

    Attributes:
        loading, computing: seconds that sweeps spent reading layers, and running forwards; they overlap.
    """

    def __init__(self, store: LayerStore) -> None:
        self.store = store
        self._sweeping = False
        self._begun = 0
        self._order: list[int] = []
        self.loading = self.computing = 0.0

    @property
    def order(self) -> tuple[int, ...]:
        """Return the layers that a forward enters, as the first forward outside a sweep showed them.

        Raises:
            UsageError: one comes after a later one, or twice.
        """
        require_order(self.store.decoder, self._order)
        return tuple(self._order)

    @contextmanager
    def attached(self) -> Iterator[LayerSweep]:
        """Keep the layers of the model loaded while they run, inside the block."""
        handles = [self.store.decoder.model.register_forward_pre_hook(self._begin)]
        for i, layer in enumerate(self.store.decoder.layers):
            handles.append(layer.register_forward_pre_hook(_Enter(self, i), prepend=True, with_kwargs=True))
            handles.append(layer.register_forward_hook(_Leave(self, i), always_call=True))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()
            for i in range(self.store.n):
                self.store.release(i)

    def run(
        self,
        forwards: Sequence[Callable[[], R]],
        *,
        layers: Sequence[int] | None = None,
        paused: Aside = lambda _number, _states: nullcontext(),
        between_layers: Callable[[], None] = lambda: None,
    ) -> list[R]:
        """Run `forwards`, each a call of the model, layer by layer; return what they returned, in order.

        Every forward passes a layer before one enters the next. The next layer is read while one computes.

        Args:
            layers: those that the forwards pass, in order, before they end by themselves; None: all.
            paused: gives the context around the time that a forward is paused, from its number and the states that enter the
                layer; these belong to the forward alone.
            between_layers: called before each layer; may raise.

        Raises:
            RunError: a forward entered a layer out of order, or one a second time.
            Whatever a forward raises; the others are dropped then.
        """
        all_paused = [_Paused(forward, partial(paused, number)) for number, forward in enumerate(forwards)]
        self._sweeping = True
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as thread:
                self._sweep(all_paused, range(self.store.n) if layers is None else layers, between_layers, thread)
            return [forward.result for forward in all_paused]
        finally:
            self._sweeping = False
            for forward in all_paused:
                forward.drop()

    def _sweep(
        self,
        paused: Sequence[_Paused[Any]],
        layers: Sequence[int],
        between_layers: Callable[[], None],
        thread: ThreadPoolExecutor,
    ) -> None:
        ahead: Future[None] = thread.submit(self._load, layers[0])
        for forward in paused:
            forward.resume()
        for layer, following in zip_longest(layers, layers[1:]):
            between_layers()
            ahead.result()
            if following is not None:
                ahead = thread.submit(self._load, following)
            began = time.perf_counter()
            for forward in paused:
                forward.require_at(layer)
                forward.resume()
            self.computing += time.perf_counter() - began
            self.store.release(layer)
        for forward in paused:
            forward.require_finished()

    def _load(self, layer: int) -> None:
        began = time.perf_counter()
        self.store.load(layer)
        self.loading += time.perf_counter() - began

    def enter(self, layer: int, states: Sequence[Tensor]) -> None:
        """Called by the hooks where `states` enter `layer`."""
        current = getcurrent()
        if self._sweeping and isinstance(current, _Greenlet):
            current.paused.pause(layer, states)
            return
        if self._begun == 1:
            self._order.append(layer)
        self.store.load(layer)

    def _begin(self, _model: nn.Module, _args: Any) -> None:
        self._begun += not self._sweeping

    def leave(self, layer: int) -> None:
        """Called by the hooks where a forward leaves `layer`."""
        if not self._sweeping:
            self.store.release(layer)


class _Paused(Generic[R]):
    """One forward, run until it enters a layer, then on to the next."""

    def __init__(
        self, forward: Callable[[], R], paused: Callable[[Sequence[Tensor]], AbstractContextManager[None]]
    ) -> None:
        self._paused = paused
        self._greenlet = _Greenlet(self, forward)
        self._at: int | None = None
        self._result: list[R] = []

    @property
    def finished(self) -> bool:
        return bool(self._result)

    @property
    def result(self) -> R:
        return self._result[0]

    def resume(self) -> None:
        value = self._greenlet.switch()
        if self._greenlet.dead:
            self._result.append(value)

    def pause(self, layer: int, states: Sequence[Tensor]) -> None:
        self._at = layer
        with self._paused(states):
            self._greenlet.parent.switch()

    def require_at(self, layer: int) -> None:
        if self._at != layer:
            raise RunError(
                f"the model entered decoder layer {self._at} where layer {layer} was next, so its weights cannot be streamed."
            )

    def require_finished(self) -> None:
        if not self.finished:
            raise RunError(
                f"the model entered decoder layer {self._at} after the last one that it was to run, so its weights cannot be "
                "streamed."
            )

    def drop(self) -> None:
        """End the forward where it is paused."""
        if not self._greenlet.dead:
            self._greenlet.throw()


class _Greenlet(greenlet):  # type: ignore[misc]  # it comes without types
    def __init__(self, paused: _Paused[Any], forward: Callable[[], Any]) -> None:
        super().__init__(forward)
        self.paused = paused


class _Enter:
    def __init__(self, sweep: LayerSweep, layer: int) -> None:
        self._sweep, self._layer = sweep, layer

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The residual stream comes first, or by this name; what comes with it (masks, positions) may belong to other forwards.
        state = args[0] if args else kwargs.get("hidden_states")
        self._sweep.enter(self._layer, [state] if isinstance(state, Tensor) else [])


class _Leave:
    def __init__(self, sweep: LayerSweep, layer: int) -> None:
        self._sweep, self._layer = sweep, layer

    def __call__(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._sweep.leave(self._layer)
