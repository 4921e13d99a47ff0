"""What a shard's header declares of its hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..store import Shard

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
    """Where the rows of one tap lie, and which state they are said to be.

    Attributes:
        label: the tap in the words of the ids that were asked for, such as ``layer 14`` or ``pre-norm``.
        slot: which of the K rows of `column`; None where the column is the tap's own.
    """

    label: str
    column: str
    slot: int | None
    state: State

    def rows(self, columns: Mapping[str, Tensor]) -> Tensor:
        """(S, H) of one sample's columns."""
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
    def comparable_taps(self) -> tuple[DeclaredTap, ...]:
        """Those that a plain forward shows: a mixture or a choice among several streams is a reading of its own."""
        return tuple(tap for tap in self.taps if self.adapter in COMPARABLE or tap.column != "aux_hidden_states")

    @classmethod
    def of(cls, shard: Shard) -> Declaration:
        """Raises ValueError saying what a header lacks or where it contradicts the shard's tensors."""
        about = shard.metadata
        try:
            return _read(about, shard)
        except KeyError as error:
            raise ValueError(f"its header does not say which states it holds: {error} is missing") from error
        except (TypeError, AttributeError) as error:
            raise ValueError(f"its header does not say which states it holds: {error}") from error


def _read(about: Mapping[str, Any], shard: Shard) -> Declaration:
    columns = {column.name: column for column in shard.columns}
    attention = about.get("attn_implementation")
    made_with = about.get("made_with", {})
    return Declaration(
        taps=_taps(about["taps"], {name: column.shape for name, column in columns.items()}),
        n=int(about["taps"]["num_hidden_layers"]),
        layers_path=about["taps"].get("layers_path"),
        adapter=about["taps"].get("adapter"),
        model=about["model"],
        # What the run computes in may be told of its weights alone: some models keep their residual stream in float32.
        dtype=about["model"].get("weights_dtype") or about["compute_dtype"],
        attn_implementation=attention if isinstance(attention, str) else None,
        # Rows of a generation come from cached steps, whose bits no single forward has.
        exact=about.get("mode") == "exact"
        and "output_ids" not in columns
        and made_with.get("compiled", "off") == "off",
        threads=made_with.get("threads"),
        made_with=made_with,
    )


def _taps(taps: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> tuple[DeclaredTap, ...]:
    n, boundaries = int(taps["num_hidden_layers"]), taps["boundaries"]
    found = []
    if "aux_hidden_states" in shapes:
        K = shapes["aux_hidden_states"][0]
        if len(boundaries) != K or not all(0 <= b <= n for b in boundaries):
            raise ValueError(f"its header declares boundaries {boundaries} of {n} layers and it holds {K} states a row")
        by_layer = taps["convention"] == "layer_output"
        labels = [f"layer {b - 1}" if by_layer else f"boundary {b}" for b in boundaries]
        found = [
            DeclaredTap(label, "aux_hidden_states", slot, State(b))
            for slot, (label, b) in enumerate(zip(labels, boundaries, strict=True))
        ]
    if "pre_norm" in shapes:
        found.append(DeclaredTap("pre-norm", "pre_norm", None, State(n)))
    if "post_norm" in shapes:
        found.append(DeclaredTap("post-norm", "post_norm", None, State(n, normed=True)))
    return tuple(found)
