"""The declaration of a shard's hidden states in its header."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from torch import Tensor

from ...models.choices import DtypeName
from ...models.published_form import DEQUANTIZED
from ..store import Shard, ShardDescription, TapsDescription
from ..store.description import AUX

# Ways of reading a layer (`models.adapters`) that give what the next layer takes in; None is the plain one.
COMPARABLE = (None, "next_input", "tuple.first", "hidden_residual.sum")


@dataclass(frozen=True, order=True)
class State:
    """A state of the model: boundary k, or, `normed`, what the final norm makes of boundary n."""

    boundary: int
    normed: bool = False

    def __str__(self) -> str:
        return "post-norm" if self.normed else f"boundary {self.boundary}"


@dataclass(frozen=True)
class DeclaredTap:
    """The column and slot of one tap, and the state that its rows are declared to be.

    Attributes:
        label: the tap in the words of the ids that were asked for, such as ``layer 14`` or ``pre-norm``.
        slot: which of the K rows of `column`; None where the column is the tap's own.
    """

    label: str
    column: str
    slot: int | None
    state: State

    def rows(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Return (S, H) of one sample's columns."""
        rows = columns[self.column]
        return rows if self.slot is None else rows[:, self.slot].contiguous()


@dataclass(frozen=True)
class Declaration:
    """A header's words.

    Attributes:
        taps: those of the columns that are there.
        n: number of decoder layers.
        adapter: how layers were read where that is not plain.
        dtype: what the weights were in, so what the run computed in.
        exact: made one sample a forward, without a cache, so that bits can be asked for.
        threads, libraries: what the rows were made with; None and {} where that is not told.
    """

    taps: tuple[DeclaredTap, ...]
    n: int
    layers_path: str | None
    adapter: str | None
    model: Mapping[str, Any]
    dtype: str
    attn_implementation: str | None
    exact: bool
    threads: int | None
    made_with: Mapping[str, Any]

    @property
    def load_dtype(self) -> str:
        """What to load the model in: ``auto`` where its weights stay quantized, which no dtype says."""
        return self.dtype if _is_plain(self.model) or not self.model.get("weights_dtype") else "auto"

    @property
    def keeps_quantized(self) -> bool:
        """Return whether the run computed in the arithmetic of a quantizer; older headers say so by the weights' dtype alone."""
        told = self.model.get("quantization")
        if told is None:
            return self.load_dtype == "auto"
        return bool(told["weights"] != DEQUANTIZED)

    @property
    def comparable_taps(self) -> tuple[DeclaredTap, ...]:
        """Those that a plain forward shows: a mixture or a choice among several streams is a reading of its own."""
        return tuple(tap for tap in self.taps if self.adapter in COMPARABLE or tap.column != "aux_hidden_states")

    @classmethod
    def of(cls, shard: Shard) -> Declaration:
        """Raises ValueError saying what a header lacks or where it contradicts the shard's tensors."""
        about = shard.description
        if about.taps is None:
            found = "is missing" if about.json.get("taps") is None else f"is {about.json['taps']!r}"
            raise ValueError(f"its header does not say which states it holds: 'taps' {found}")
        dtype = about.model["weights_dtype"] if _is_plain(about.model) else about.compute_dtype
        if dtype is None:
            raise ValueError("its header does not say which states it holds: 'compute_dtype' is missing")
        return cls(
            taps=_taps(about, about.taps, shard.shapes),
            n=about.taps.n,
            layers_path=about.taps.layers_path,
            adapter=about.taps.adapter,
            model=about.model,
            # What the run computes in may be told of its weights alone: some models keep their residual stream in float32.
            dtype=str(dtype),
            attn_implementation=about.attn_implementation,
            # Rows of a generation come from cached steps, whose bits no single forward has.
            exact=about.mode == "exact"
            and "output_ids" not in shard.shapes
            and about.made_with.get("compiled", "off") == "off",
            threads=about.made_with.get("threads"),
            made_with=about.made_with,
        )


def _is_plain(model: Mapping[str, Any]) -> bool:
    """Return whether most weights were in a dtype to compute in, and not in a quantizer's own."""
    return model.get("weights_dtype") in get_args(DtypeName)


def _taps(
    about: ShardDescription, taps: TapsDescription, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[DeclaredTap, ...]:
    K, boundaries = shapes[AUX][0] if AUX in shapes else taps.K, list(taps.boundaries)
    if taps.K != K or not all(0 <= b <= taps.n for b in boundaries):
        raise ValueError(
            f"its header declares boundaries {boundaries} of {taps.n} layers and it holds {K} states a row"
        )
    return tuple(
        DeclaredTap(
            state.label,
            state.column,
            state.slot,
            State(taps.n if state.boundary is None else state.boundary, state.normed),
        )
        for state in about.states(shapes)
    )
