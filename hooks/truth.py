"""The check that makes a tap true when it is attached: the model is watched while it runs once.

The output of each decoder layer must be, bit for bit, what the next one takes in. What is found on the way out, between the
last layer and the model's head, tells which module is the final norm: it is looked for by what it is given, not by its name.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..models.adapter_names import how_to_name
from ..models.call import eagerly, few_ids, randomness_kept, without_cache
from ..models.decoder import Decoder
from ..models.modules import same_bits, unwrapped
from .errors import TapError
from .residual import blocks_beside, describe, entering, entering_norm, form_fault, leaving


@dataclass(frozen=True)
class FinalNorm:
    """The module between the last decoder layer and the head, where it is, and the width H of what enters it.

    H differs from that of the boundaries where an adapter keeps several residual streams.
    """

    path: str
    module: nn.Module
    hidden_size: int


@dataclass(frozen=True)
class Truth:
    """Observations of one watched forward.

    Attributes:
        visits: how often each of the n layers ran.
        broken: boundary -> why its value, taken at a layer's output, would not be what the next layer sees.
        norm: the final norm, or None where the model has none.
        hidden_size, dtype: H and dtype of the last layer output that could be read, None where none could.
    """

    visits: tuple[int, ...]
    broken: dict[int, str]
    norm: FinalNorm | None
    hidden_size: int | None
    dtype: torch.dtype | None

    def require(self, decoder: Decoder, boundaries: tuple[int, ...]) -> None:
        """Raise TapError unless each of `boundaries` was seen to hold."""
        for b in boundaries:
            layer = decoder.site(b).layer
            if self.visits[layer] != 1:
                raise TapError(
                    f"{decoder.layer_path(layer)} ran {self.visits[layer]} times in one forward of "
                    f"{type(decoder.model).__name__}; boundary {b} needs it to run exactly once."
                )
            if b in self.broken:
                raise TapError(f"boundary {b} of {type(decoder.model).__name__} cannot be tapped: {self.broken[b]}")

    def require_norm(self, decoder: Decoder) -> FinalNorm:
        """Return the final norm, or TapError."""
        if self.norm is None:
            raise TapError(
                f"no final norm was found after {decoder.layer_path(decoder.n - 1)} of {type(decoder.model).__name__}, so "
                'pre-norm and post-norm are not defined for it; ask for final="none" (--final none).'
            )
        return self.norm


class Watch:
    """Temporary hooks that follow one forward of this thread from layer to layer, holding one state at a time."""

    def __init__(self, decoder: Decoder, shape: tuple[int, int] | None = None) -> None:
        """`shape`: B and S of the forward, to be found in every state; None where a collector looks for them already."""
        self._decoder, self._shape = decoder, shape
        self._thread = threading.get_ident()
        self._visits = [0] * decoder.n
        self._broken: dict[int, str] = {}
        self._last: tuple[int, Tensor] | None = None
        self._norms: list[tuple[FinalNorm, bool]] = []
        self._form: tuple[int | None, torch.dtype | None] = (None, None)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what runs inside the block; the hooks are gone afterwards, whatever happened."""
        handles = []
        for i, layer in enumerate(self._decoder.layers):
            handles.append(layer.register_forward_pre_hook(_LayerIn(self, i), with_kwargs=True))
            handles.append(layer.register_forward_hook(_LayerOut(self, i)))
        for path, module in self._decoder.modules_outside_layers():
            if "norm" in type(unwrapped(module)).__name__.lower():
                handles.append(module.register_forward_pre_hook(_NormIn(self, path), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._last = None

    def truth(self) -> Truth:
        """Return what the forward showed; call it afterwards."""
        beside_layers, widths = self._decoder.layers_path.rpartition(".")[0], self._decoder.widths
        norms = [(norm, is_equal) for norm, is_equal in self._norms if not widths or norm.hidden_size in widths]
        equal = [norm for norm, is_equal in norms if is_equal]
        # Where something stands between the last layer and the norm, only a norm beside the layers can be the model's own:
        # a norm elsewhere belongs to a head.
        beside = [norm for norm, _ in norms if norm.path.rpartition(".")[0] == beside_layers]
        norm = next(iter(equal + beside), None)
        return Truth(tuple(self._visits), dict(self._broken), norm, *self._form)

    @property
    def own_thread(self) -> bool:
        """Return whether what runs now runs in the thread that is watched: others may use the model at the same time."""
        return threading.get_ident() == self._thread

    def layer_in(self, i: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._norms.clear()  # a norm that ran before a layer is not the final one
        where = self._decoder.layer_path(i)
        try:
            state = entering(self._decoder.adapter, args, kwargs, where)
        except TapError as unreadable:
            self._broken.setdefault(i, str(unreadable))
            return
        fault = self._form_fault(state, where) or blocks_beside(self._decoder, state, args, kwargs, where)
        if fault is not None:
            self._broken.setdefault(i, fault)
            self._broken.setdefault(i + 1, fault)
        elif self._last is not None and not self._decoder.site(i).at_input and not same_bits(self._last[1], state):
            self._broken.setdefault(self._last[0] + 1, _changed_between(self._decoder, self._last[0], i))

    def layer_out(self, i: int, output: Any) -> None:
        self._visits[i] += 1
        where = self._decoder.layer_path(i)
        try:
            state = leaving(self._decoder.adapter, output, where).detach().clone()
        except TapError as unreadable:
            self._last = None
            self._broken.setdefault(i + 1, str(unreadable))
            return
        self._last, self._form = (i, state), (state.shape[-1], state.dtype)
        fault = self._form_fault(state, where)
        if fault is not None:
            self._broken.setdefault(i + 1, fault)

    def _form_fault(self, state: Tensor, where: str) -> str | None:
        fault = form_fault(self._decoder, state, where)
        if fault is not None or self._shape is None or state.ndim != 3 or tuple(state.shape[:2]) == self._shape:
            return fault
        B, S = self._shape
        return (
            f"{where} handles {describe(state)} in a forward of {B} sequences of {S} tokens; expected ({B}, {S}, H), batch first "
            "and one row for each token."
        )

    def norm_in(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._last is None:
            return
        try:
            state = entering_norm(self._decoder.adapter, args, kwargs, path)
        except TapError:  # a norm that cannot be read is none that can be tapped
            return
        self._norms.append((FinalNorm(path, module, state.shape[-1]), same_bits(self._last[1], state)))


def _changed_between(decoder: Decoder, before: int, after: int) -> str:
    return (
        f"what {decoder.layer_path(before)} gives out is not, bit for bit, what {decoder.layer_path(after)} takes in, so the "
        f"model changes the residual stream between its layers. {how_to_name('next_input')}"
    )


@dataclass(frozen=True)
class _LayerIn:
    watch: Watch
    i: int

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        # Another thread that is inside the module while hooks come and go calls this one without the keyword arguments.
        if self.watch.own_thread:
            self.watch.layer_in(self.i, args, kwargs or {})


@dataclass(frozen=True)
class _LayerOut:
    watch: Watch
    i: int

    def __call__(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if self.watch.own_thread:
            self.watch.layer_out(self.i, output)


@dataclass(frozen=True)
class _NormIn:
    watch: Watch
    path: str

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if self.watch.own_thread:
            self.watch.norm_in(self.path, module, args, kwargs or {})


@torch.no_grad()
def probe(decoder: Decoder, *, tokens: int = 5) -> Truth:
    """Run the model once over two rows of a few tokens and watch it. Two rows, so that a swapped batch axis shows.

    Raises:
        TapError: the model does not run on plain token ids alone.
    """
    model, watch = decoder.model, Watch(decoder, (2, tokens))
    ids = few_ids(model, decoder.vocab_rows, 2, tokens)
    with watch.watching(), randomness_kept(model), eagerly(model), _refusing(model):
        model(ids, **without_cache(model))
    return watch.truth()


@contextmanager
def _refusing(model: nn.Module) -> Iterator[None]:
    """Turn what a model raises on plain token ids into a refusal; a TapError says its own."""
    try:
        yield
    except TapError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        raise TapError(
            f"{type(model).__name__} did not run on token ids alone, (2, 5) of them, so no tap on it can be checked: "
            f"{type(error).__name__}: {error}"
        ) from error
