"""The check that makes a tap true when it is attached: the model is watched while it runs once.

The output of each decoder layer must be, bit for bit, what the next one takes in. What is found on the way out, between the
last layer and the model's head, tells which module is the final norm: it is looked for by what it is given, not by its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..models.call import input_device, without_cache
from ..models.decoder import Decoder, text_config, unwrapped
from .errors import TapError
from .residual import read_input, read_output

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class FinalNorm:
    """The module between the last decoder layer and the head, and where it is."""

    path: str
    module: nn.Module


@dataclass(frozen=True)
class Truth:
    """What one watched forward showed.

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
            layer = max(b - 1, 0)
            if self.visits[layer] != 1:
                raise TapError(
                    f"{decoder.layer_path(layer)} ran {self.visits[layer]} times in one forward of "
                    f"{type(decoder.model).__name__}; boundary {b} needs it to run exactly once."
                )
            if b in self.broken:
                raise TapError(f"boundary {b} of {type(decoder.model).__name__} cannot be tapped: {self.broken[b]}")

    def require_norm(self, decoder: Decoder) -> FinalNorm:
        """The final norm, or TapError."""
        if self.norm is None:
            raise TapError(
                f"no final norm was found after {decoder.layer_path(decoder.n - 1)} of {type(decoder.model).__name__}, so "
                'pre-norm and post-norm are not defined for it; ask for final="none".'
            )
        return self.norm


class Watch:
    """Temporary hooks that follow one forward from layer to layer, holding one state at a time."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
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
        """What was seen; to be asked after the forward."""
        beside_layers = self._decoder.layers_path.rpartition(".")[0]
        equal = [norm for norm, is_equal in self._norms if is_equal]
        # Where something stands between the last layer and the norm, only a norm beside the layers can be the model's own:
        # a norm elsewhere belongs to a head.
        beside = [norm for norm, _ in self._norms if norm.path.rpartition(".")[0] == beside_layers]
        norm = next(iter(equal + beside), None)
        return Truth(tuple(self._visits), dict(self._broken), norm, *self._form)

    def layer_in(self, i: int, state: Tensor) -> None:
        if self._last is not None and not same_bits(self._last[1], state):
            before = self._decoder.layer_path(self._last[0])
            self._broken.setdefault(
                self._last[0] + 1,
                f"what {before} gives out is not, bit for bit, what {self._decoder.layer_path(i)} takes in, so the model "
                "changes the residual stream between its layers. It needs an adapter.",
            )

    def layer_out(self, i: int, output: Any) -> None:
        self._visits[i] += 1
        try:
            state = read_output(output, self._decoder.layer_path(i)).detach().clone()
            self._last, self._form = (i, state), (state.shape[-1], state.dtype)
        except TapError as unreadable:
            self._last = None
            self._broken[i + 1] = str(unreadable)

    def norm_in(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._last is None or self._last[0] != self._decoder.n - 1:
            return
        self._norms.append((FinalNorm(path, module), same_bits(self._last[1], read_input(args, kwargs, path))))


@dataclass(frozen=True)
class _LayerIn:
    watch: Watch
    i: int

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.watch.layer_in(self.i, read_input(args, kwargs, self.watch._decoder.layer_path(self.i)))


@dataclass(frozen=True)
class _LayerOut:
    watch: Watch
    i: int

    def __call__(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self.watch.layer_out(self.i, output)


@dataclass(frozen=True)
class _NormIn:
    watch: Watch
    path: str

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.watch.norm_in(self.path, module, args, kwargs)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two floating tensors are equal bit for bit: NaN equals NaN, and 0.0 is not -0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    bits = _BITS[a.element_size()]
    return torch.equal(a.contiguous().view(bits), b.detach().to(a.device).contiguous().view(bits))


@torch.no_grad()
def probe(decoder: Decoder, *, tokens: int = 5) -> Truth:
    """Run the model once over two rows of a few tokens and watch it. Two rows, so that a swapped batch axis shows."""
    ids = _plain_ids(decoder, 2 * tokens).reshape(2, tokens).to(input_device(decoder.model))
    watch = Watch(decoder)
    with watch.watching():
        decoder.model(ids, **without_cache(decoder.model))
    return watch.truth()


def _plain_ids(decoder: Decoder, count: int) -> Tensor:
    """(count,) int64 ids that differ where they can, spread over the vocabulary, none of which the config gives a role to."""
    config = getattr(decoder.model, "config", None)
    special: set[int] = set()
    for part in (config, text_config(config)):
        for name, value in vars(part).items() if part is not None else ():
            if name.endswith(("token_id", "token_index")):
                special.update(
                    v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, int)
                )
    rows = decoder.vocab_rows or 2 * count
    plain = [i for i in range(0, rows, max(rows // (4 * count), 1)) if i not in special] or list(range(rows))
    return torch.tensor([plain[i % len(plain)] for i in range(count)])
