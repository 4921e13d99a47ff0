"""A plain forward of the model, the other witness: nothing here is shared with the taps.

Boundaries 0..n-1 are the model's own ``hidden_states``, recorded by transformers. These have no entry for boundary n of most
models (the last one is normed), and in a few (the Mamba family) entry k is not boundary k. So two things are seen by plain
hooks written here. What enters the final norm is boundary n and pre-norm, what leaves it is post-norm; the norm is found by
its values, not by name. And what enters decoder layer k must be entry k of ``hidden_states``: where it is not, what enters the
layers is used instead, and `source` says so. The taps read what *leaves* the layers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ...models.call import input_device, without_cache
from ...models.errors import RunError
from .declared import State
from .final_norm import find_final_norm, like_norms

PROBE_TOKENS = 8


class NoReferenceError(RunError):
    """The model's states cannot be told from a plain forward."""


@dataclass(frozen=True)
class PlainStates:
    """States of one plain forward of one sample, on the model's device.

    states: (S, H) each; those that the model shows in another shape are absent. logits: (S, V), None where it gives none.
    """

    states: Mapping[State, Tensor]
    logits: Tensor | None


class PlainForward:
    """Runs single samples through `model`.

    Forwards in several threads may be under way at once, each paused while another computes. `probe` comes first, or ahead of
    the others in every layer.

    Attributes:
        n: number of decoder layers.
        norm: the final norm, None where none was found.
        source: what the states are taken from, in words; None before `probe`.
    """

    def __init__(self, model: Any, layers_path: str | None, n: int) -> None:
        """layers_path: where the header says that the n decoder layers are; None leaves ``hidden_states`` unchecked.

        Raises NoReferenceError.
        """
        self._model, self._device, self.n = model, input_device(model), n
        self._layers_path, self._layers = layers_path, _children(model, layers_path)
        self.norm: nn.Module | None = None
        self.source: str | None = None
        self._by_layers = bool(self._layers)
        if self._layers:
            self._require_n(len(self._layers))

    @torch.inference_mode()
    def probe(self, input_ids: Tensor) -> None:
        """Try `input_ids` (S,), a few of them, to see what the model shows; raises NoReferenceError."""
        outputs: list[Any] = []

        def forward() -> Any:
            outputs.append(self._call(input_ids[:PROBE_TOKENS]))
            return outputs[0]

        with _entering(self._layers) as entered:
            found = find_final_norm(self._model, forward)
        shown = _hidden_states(outputs[0])
        if not self._layers:
            self._require_n(len(shown) - 1)
        self.norm = found[1] if found else None
        self._by_layers = bool(self._layers) and not _agree(shown, entered, self.n)
        if not self._by_layers and len(shown) != self.n + 1:
            raise NoReferenceError(
                f"{type(self._model).__name__} shows {len(shown)} hidden states, {self.n + 1} were expected."
            )
        self.source = self._words(found[0] if found else None, self._layers_path)

    @torch.inference_mode()
    def __call__(self, input_ids: Tensor) -> PlainStates:
        """input_ids: (S,)"""
        # A probe that is under way tells the norm before this forward is there.
        norms = like_norms(self._model) if self.source is None else [self.norm] if self.norm else []
        with ExitStack() as stack:
            entered = stack.enter_context(_entering(self._layers if self._by_layers else []))
            normed = stack.enter_context(_around(norms, lambda module: module is self.norm))
            output = self._call(input_ids)
        before_last = entered if self._by_layers else dict(enumerate(_hidden_states(output)[: self.n]))
        shown = {State(k): state for k, state in before_last.items()}
        shown |= {State(self.n, normed=leaves): state for leaves, state in normed.items()}
        logits = getattr(output, "logits", None)
        return PlainStates(
            {name: state[0] for name, state in shown.items() if state.ndim == 3 and state.shape[1] == len(input_ids)},
            logits[0] if isinstance(logits, Tensor) else None,
        )

    def _require_n(self, found: int) -> None:
        if found != self.n:
            raise NoReferenceError(f"it has {found} decoder layers and the headers say {self.n}: it is another model.")

    def _call(self, ids: Tensor) -> Any:
        batch = ids[None].to(self._device, torch.int64)
        return self._model(batch, output_hidden_states=True, **without_cache(self._model))

    def _words(self, norm_path: str | None, layers_path: str | None) -> str:
        name = type(self._model).__name__
        if self._by_layers:
            first = f"what enters the layers at {layers_path} (hidden_states of {name} are not these)"
        else:
            first = f"hidden_states of {name}" + (
                "" if self._layers else " (their order is not checked: no layers are named)"
            )
        last = f"what enters and leaves {norm_path}" if norm_path else "no final norm was found"
        return f"plain forwards, one sample each: {first} for boundaries 0..{self.n - 1}; {last} for boundary {self.n}"


def _children(model: nn.Module, path: str | None) -> list[nn.Module]:
    if path is None:
        return []
    try:
        return list(model.get_submodule(path).children())
    except AttributeError as error:
        raise NoReferenceError(
            f"{type(model).__name__} has no layers at {path}, where the headers say they are."
        ) from error


def _hidden_states(output: Any) -> tuple[Tensor, ...]:
    states = getattr(output, "hidden_states", None)
    if not states or not all(isinstance(state, Tensor) for state in states):
        raise NoReferenceError(f"{type(output).__name__} holds no hidden_states.")
    return tuple(states)


def _agree(shown: tuple[Tensor, ...], entered: Mapping[int, Tensor], n: int) -> bool:
    return len(shown) == n + 1 and all(k in entered and torch.equal(shown[k], entered[k]) for k in range(n))


@contextmanager
def _entering(layers: list[nn.Module]) -> Iterator[dict[int, Tensor]]:
    """Yield the (1, S, H) tensor that enters each layer, by its place, filled by each forward of this thread in the block."""
    entered: dict[int, Tensor] = {}
    mine = threading.get_ident()

    def note(k: int) -> Callable[..., None]:
        # A forward that is paused where it enters the layer calls the hooks of one that ended meanwhile, without kwargs.
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] = MappingProxyType({})) -> None:
            state = args[0] if args else kwargs.get("hidden_states")
            if isinstance(state, Tensor) and threading.get_ident() == mine:
                entered[k] = state.clone()

        return hook

    handles = [layer.register_forward_pre_hook(note(k), with_kwargs=True) for k, layer in enumerate(layers)]
    try:
        yield entered
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _around(norms: Sequence[nn.Module], is_it: Callable[[nn.Module], bool]) -> Iterator[dict[bool, Tensor]]:
    """Yield the states that enter (False) and leave (True) the norm, filled by each forward of this thread in the block.

    norms: the modules that may be it; is_it: which one is, asked where a forward enters it.
    """
    seen: dict[bool, Tensor] = {}
    mine = threading.get_ident()

    def entering(module: nn.Module, args: tuple[Any, ...]) -> None:
        if threading.get_ident() == mine and is_it(module):
            seen[False] = args[0].clone()

    def leaving(module: nn.Module, _args: Any, output: Any) -> None:
        if threading.get_ident() == mine and is_it(module):
            seen[True] = output

    handles = [norm.register_forward_pre_hook(entering) for norm in norms]
    handles += [norm.register_forward_hook(leaving) for norm in norms]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
