"""The ways to run a model, in one table: entry point, padding, who tells of it, cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import StaticCache

from .wrappers import Wrapper

Entry = Literal["tap", "mixin", "threads", "generate", "offline", "sampling"]
WIDER = 3


@dataclass(frozen=True)
class Way:
    """One way to run.

    Attributes:
        entry: the public entry point: `tap(...).run`, a call or `generate()` of a `with_capture` model, `capture_dataset`,
            `generate_with_capture`; ``threads``: calls of one model from several threads.
        padding: where the batch is padded; ``none``: one call for each sample.
        told: what says so: `lengths`, an attention mask, a mask wider than the batch, or nothing (rows of one length).
        positions: whether position ids are given.
        cache: the cache that the call fills, in several steps.
        options: what else the entry point is given.
        weight: how often it is drawn.
    """

    entry: Entry
    padding: Literal["none", "left", "right"] = "none"
    told: Literal["lengths", "mask", "wide mask", "nothing"] = "nothing"
    positions: bool = False
    cache: Literal["", "dynamic", "static"] = ""
    options: tuple[str, ...] = ()
    weight: int = 2

    @property
    def name(self) -> str:
        told = self.told if self.padding != "none" or self.told != "nothing" else "alone"
        parts = [self.entry, self.padding if self.padding != "none" else "", told]
        parts += ["positions" if self.positions else "", f"{self.cache} cache" if self.cache else "", *self.options]
        return " ".join(part for part in parts if part)

    @property
    def alone(self) -> bool:
        """Whether each sample has a call of its own."""
        return self.padding == "none"

    @property
    def exact(self) -> bool:
        """Whether rows must have the bits of a plain forward: one unpadded sample, no cache."""
        return self.alone and self.told == "nothing" and not self.cache and self.entry not in ("generate", "sampling")

    @property
    def keeps_a_cache(self) -> bool:
        """Whether later tokens run on what earlier ones left in a cache."""
        return bool(self.cache) or self.entry in ("generate", "sampling")

    def takes(self, wrapper: Wrapper) -> bool:
        """Whether it can be combined with `wrapper`."""
        if self.entry in ("tap", "sampling"):
            return wrapper.captured == "outer"
        return self.entry == "mixin" or (self.entry == "generate" and wrapper.generates) or wrapper.name == "none"


WAYS: dict[str, Way] = {
    way.name: way
    for way in (
        *(
            way
            for entry in ("tap", "mixin")
            for way in (
                Way(entry, weight=3),
                Way(entry, "right", "nothing", weight=3),
                Way(entry, "right", "lengths", weight=5),
                Way(entry, "right", "mask", weight=3),
                Way(entry, "left", "mask", weight=5),
                Way(entry, "left", "mask", positions=True),
                Way(entry, "none", "wide mask", weight=1),
                Way(entry, "left", "wide mask", weight=1),
                Way(entry, cache="dynamic"),
                Way(entry, cache="static"),
                Way(entry, "none", "wide mask", cache="static"),
                Way(entry, "left", "mask", cache="dynamic"),
                Way(entry, "left", "mask", positions=True, cache="dynamic"),
                Way(entry, "left", "mask", cache="static"),
                Way(entry, "left", "wide mask", positions=True, cache="static"),
            )
        ),
        Way("threads"),
        Way("generate", weight=4),
        Way("generate", options=("uncached",)),
        Way("generate", "left", "mask", weight=5),
        Way("generate", "left", "mask", options=("static",)),
        Way("generate", "left", "mask", options=("chunked",)),
        Way("generate", "right", "mask", weight=1),
        Way("offline", weight=2, options=("exact",)),
        Way("offline", "right", "lengths", weight=8),
        Way("sampling", "right", "lengths", weight=5),
        Way("sampling", "right", "lengths", options=("chunked",)),
        Way("sampling", "right", "lengths", options=("lookup",)),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One call of a model.

    Attributes:
        kwargs: what the model is called with; `lengths` is hiddentap's own word.
        samples: which samples the batch rows are.
        real: of each batch row the columns of this call that hold tokens.
    """

    kwargs: dict[str, Any]
    samples: tuple[int, ...]
    real: tuple[range, ...]


def run_steps(way: Way, samples: Sequence[Tensor], cut: float, model: nn.Module, call: Callable[[Step], Any]) -> None:
    """Make the calls of a ``tap`` or ``mixin`` way, one after the other, by `call`, which returns the model's output."""
    numbers = range(len(samples))
    for batch in [(i,) for i in numbers] if way.alone else [tuple(numbers)]:
        _run_batch(way, batch, [samples[i] for i in batch], cut, model, call)


def _run_batch(
    way: Way, batch: tuple[int, ...], samples: list[Tensor], cut: float, model: nn.Module, call: Callable[[Step], Any]
) -> None:
    ids, mask = padded(samples, "right" if way.alone else way.padding)
    W, extra = ids.shape[1], WIDER if way.told == "wide mask" else 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    static = {"past_key_values": StaticCache(config=model.config, max_cache_len=W + extra)}
    cache: dict[str, Any] = static if way.cache == "static" else {}
    for begin, end in pairwise(_edges(mask, cut) if way.cache else [0, W]):
        columns = slice(begin, end)
        kwargs: dict[str, Any] = {"input_ids": ids[:, columns], "use_cache": bool(way.cache)} | cache
        if way.told == "lengths":
            kwargs["lengths"] = mask.sum(1).tolist()
        elif way.told != "nothing":
            kwargs["attention_mask"] = torch.nn.functional.pad(mask, (0, extra)) if extra else mask[:, :end]
        if way.positions:
            kwargs["position_ids"] = positions[:, columns]
        real = tuple(_real(row[columns]) for row in mask)
        output = call(Step(kwargs, batch, real))
        if way.cache and end < W:
            cache = _filled(cache, output, model)


def _filled(given: dict[str, Any], output: Any, model: nn.Module) -> dict[str, Any]:
    """The cache for the next call, under its name: the one that was given, if the model filled it, or the one it made."""
    if not given:
        made = {name: getattr(output, name, None) for name in ("past_key_values", "cache_params", "state")}
        given = {name: cache for name, cache in made.items() if cache is not None}
        if not given:
            raise NoCacheError(f"{type(model).__name__} returns no cache")
    elif not _holds_something(given["past_key_values"]):
        raise NoCacheError(f"{type(model).__name__} takes no notice of the cache it is given")
    return given


def _holds_something(cache: Any) -> bool:
    try:
        return bool(cache.get_seq_length())
    except ValueError:  # transformers' way to say that a cache has no layer that counts
        return bool(cache.has_previous_state())


class NoCacheError(Exception):
    """A model that keeps its cache where this program does not look for it."""


def padded(samples: Sequence[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """(B, W) ids, with id 0 where there is no token, and the (B, W) mask of 0 and 1."""
    W = max(len(sample) for sample in samples)
    ids, mask = torch.zeros(len(samples), W, dtype=torch.int64), torch.zeros(len(samples), W, dtype=torch.int64)
    for row, sample in enumerate(samples):
        columns = slice(W - len(sample), W) if side == "left" else slice(0, len(sample))
        ids[row, columns], mask[row, columns] = sample, 1
    return ids, mask


def _edges(mask: Tensor, cut: float) -> list[int]:
    """Columns at which a run on a cache is cut, each part with a token of every row: a prompt, one token, the rest."""
    W = mask.shape[1]
    first = int(mask.argmax(1).max()) + 1
    if first >= W:
        return [0, W]
    begin = first + int(cut * (W - first))
    return sorted({0, begin, min(begin + 1, W), W})


def _real(row: Tensor) -> range:
    columns = row.nonzero().flatten().tolist()
    return range(columns[0], columns[-1] + 1)
