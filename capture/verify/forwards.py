"""Plain forwards of a model that does not fit in memory: all of them pass a decoder layer before the next one is read."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Generic, TypeVar

import torch

from ...models.call import input_device, input_embedding
from ...models.loaded_model import LoadedModel
from ...models.mapped_layers import MappedLayers
from ...models.memory import available_bytes
from .float32 import in_float32
from .plain_forward import NoReferenceError

R = TypeVar("R")


class InMemory:
    """Runs forwards of a model in memory one after the other."""

    told = "in memory"
    tokens_at_once = sys.maxsize

    def __init__(self, loaded: LoadedModel) -> None:
        self._model = loaded.model

    def __call__(self, calls: Sequence[Callable[[], R]]) -> list[R]:
        """Return what `calls` return."""
        return [call() for call in calls]

    def in_float32(self) -> AbstractContextManager[None]:
        """Compute with the same weights in float32 inside the block."""
        return in_float32(self._model)


class Lockstep:
    """Runs forwards, each in a thread of its own, of which one computes at a time."""

    def __init__(self, loaded: LoadedModel, layers: MappedLayers, why: str) -> None:
        """why: the model is not held in memory, in words."""
        self._model, self._layers, self._why = loaded.model, layers, why
        self._running: dict[int, _Forward[Any]] = {}
        self._wide = False
        self._sweeps = 0
        self._read_before = layers.bytes_held

    @property
    def tokens_at_once(self) -> int:
        """Return how many tokens the forwards of one call may have: their states take half of the memory that is left."""
        embedding = input_embedding(self._model)
        # Nothing shows how wide the states are where there is no embedding: one sample after the other then.
        width = int(next(embedding.parameters()).shape[-1]) if embedding else sys.maxsize
        layer = 3 * self._layers.layer_bytes  # as it is, and in float32 while it is half of it
        device = input_device(self._model)
        # Each state as the model keeps it, and its copy where it enters a layer; in float32.
        state = 2 * 4 * width * (len(self._layers.modules) + 3)
        return max(1, (available_bytes(device) - layer) // 2 // state)

    @property
    def told(self) -> str:
        """Return how the forwards ran, in words."""
        read = self._layers.bytes_held - self._read_before
        return f"layer by layer from disk ({self._why}): {read / 1e9:.1f} GB read in {self._sweeps} sweep(s)"

    @contextmanager
    def in_float32(self) -> Iterator[None]:
        """Compute with the same weights in float32 inside the block, each layer widened while it is in memory."""
        self._wide = True
        try:
            with in_float32(self._model):
                yield
        finally:
            self._wide = False

    def __call__(self, calls: Sequence[Callable[[], R]]) -> list[R]:
        """Return what `calls`, each with one forward in it, return. Between two layers they run in their order.

        Raises:
            NoReferenceError: a forward enters the layers in another order than from first to last, each once.
            Whatever a call raises.
        """
        forwards = [_Forward(call, self._running) for call in calls]
        with ExitStack() as stack:
            for k, layer in enumerate(self._layers.modules):
                stack.enter_context(layer.register_forward_pre_hook(_Stop(self._running, k), prepend=True))
            for forward in forwards:
                stack.callback(forward.abandon)
            for forward in forwards:
                forward.resume()
            for k in range(len(self._layers.modules)):
                for forward in forwards:
                    forward.require_at(k)
                with self._layers.held(k) as layer, ExitStack() as cast:
                    if self._wide:
                        cast.enter_context(in_float32(layer))
                    for forward in forwards:
                        forward.resume()
            self._sweeps += 1
            return [forward.result() for forward in forwards]


class _Forward(Generic[R]):
    """One call: `resume` lets it compute until its forward enters a layer, or ends."""

    def __init__(self, call: Callable[[], R], running: dict[int, _Forward[Any]]) -> None:
        self._call, self._running = call, running
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._outcome: Future[R] = Future()
        self._at: int | None = None
        self._abandoned = False
        self._thread = threading.Thread(
            target=self._run, args=(torch.get_num_threads(),), name="plain-forward", daemon=True
        )

    def resume(self) -> None:
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._go.release()
        self._stopped.acquire()

    def stop_at(self, layer: int) -> None:
        """Called in its thread."""
        self._at = layer
        self._stopped.release()
        self._go.acquire()
        if self._abandoned:
            raise _AbandonedError

    def require_at(self, layer: int) -> None:
        if self._outcome.done():
            self._outcome.result()  # raises what the call raised
            raise NoReferenceError(
                f"a forward ended before decoder layer {layer}, so its layers cannot be read in turn."
            )
        if self._at != layer:
            raise NoReferenceError(f"a forward entered decoder layer {self._at} where layer {layer} was next.")

    def result(self) -> R:
        if not self._outcome.done():
            raise NoReferenceError(f"a forward entered decoder layer {self._at} after the last one.")
        return self._outcome.result()

    def abandon(self) -> None:
        """End the call where it stopped; do nothing where it has ended."""
        if self._thread.ident is not None:
            self._abandoned = True
            self._go.release()
            self._thread.join()

    def _run(self, threads: int) -> None:
        torch.set_num_threads(threads)  # a new thread would take another number, and round float32 sums otherwise
        self._running[threading.get_ident()] = self
        try:
            self._outcome.set_result(self._call())
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result raises it
            self._outcome.set_exception(error)
        finally:
            del self._running[threading.get_ident()]
            self._stopped.release()


class _AbandonedError(BaseException):
    """Ends a forward whose result nobody waits for."""


class _Stop:
    def __init__(self, running: dict[int, _Forward[Any]], layer: int) -> None:
        self._running, self._layer = running, layer

    def __call__(self, _module: Any, _args: Any) -> None:
        self._running[threading.get_ident()].stop_at(self._layer)
