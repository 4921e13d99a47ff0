"""The description in a shard's header: the model, the taps, how rows were computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...models.checked_record import list_of, of_type
from ...models.errors import UsageError

AUX = "aux_hidden_states"
PRE_NORM, POST_NORM = "pre_norm", "post_norm"


@dataclass(frozen=True, order=True)
class StoredState:
    """One hidden state of every row.

    Attributes:
        label: as a person calls it: ``layer 14``, ``boundary 15``, ``pre-norm``; ``slot 1`` where the header does not say.
        column, slot: where its rows are; slot is None where the column holds this state alone.
        boundary: how many decoder layers lie before it; None where the header does not say.
        normed: whether it has left the final norm.
    """

    label: str
    column: str
    slot: int | None
    boundary: int | None
    normed: bool = False

    def rows(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Return (T, H) of the stored dtype, out of the T rows of every column."""
        rows = columns[self.column]
        return rows if self.slot is None else rows[:, self.slot]


@dataclass(frozen=True)
class TapsDescription:
    """The K boundaries of `aux_hidden_states` in slot order, in a model of `n` layers and hidden width `H`.

    Attributes:
        convention, layer_ids: the boundaries in the words of whoever asked for them.
        final: which norm states are stored beside them: none, pre, post or both.
        adapter: how layers were read where that is not plain.
    """

    convention: str
    layer_ids: tuple[int, ...]
    boundaries: tuple[int, ...]
    final: str
    n: int
    H: int
    layers_path: str | None = None
    norm_path: str | None = None
    adapter: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the header's ``taps``."""
        return {
            "convention": self.convention,
            "layer_ids": list(self.layer_ids),
            "boundaries": list(self.boundaries),
            "final": self.final,
            "num_hidden_layers": self.n,
            "hidden_size": self.H,
            "layers_path": self.layers_path,
            "norm_path": self.norm_path,
            "adapter": self.adapter,
        }

    @classmethod
    def from_json(cls, taps: Mapping[str, Any]) -> TapsDescription:
        """Return the inverse of `as_json`; KeyError, TypeError or ValueError where `taps` does not say which states they are."""
        return cls(
            convention=of_type(str, taps["convention"]),
            layer_ids=list_of(int, taps.get("layer_ids", [])),
            boundaries=list_of(int, taps["boundaries"]),
            final=of_type(str, taps.get("final", "none")),
            n=of_type(int, taps["num_hidden_layers"]),
            H=of_type(int, taps["hidden_size"]),
            layers_path=_word(taps.get("layers_path")),
            norm_path=_word(taps.get("norm_path")),
            adapter=_word(taps.get("adapter")),
        )

    @property
    def K(self) -> int:
        return len(self.boundaries)

    @property
    def has_embeddings(self) -> bool:
        return 0 in self.boundaries

    @property
    def has_last(self) -> bool:
        """Return whether the output of the last layer, before the final norm, is among the auxiliary states."""
        return self.n in self.boundaries

    @property
    def labels(self) -> tuple[str, ...]:
        """What each slot is called, from its boundary, whatever the ids say: ``layer k`` is the output of layer k."""
        if self.convention == "layer_output" and not self.has_embeddings:
            return tuple(f"layer {boundary - 1}" for boundary in self.boundaries)
        return tuple(f"boundary {boundary}" for boundary in self.boundaries)


@dataclass(frozen=True)
class ShardDescription:
    """A header's words, read once.

    Attributes:
        taps: None where the header does not say which states are stored.
        model: id, revision, class, hashes; {} where nothing is known.
        made_with: what may differ between runs that agree. tokenisation: how rows became ids; {} where nothing did here.
        mode: how rows were computed, one word. json: all of it, what has no name here too.
    """

    taps: TapsDescription | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    compute_dtype: str | None = None
    store_dtype: str | None = None
    mode: str | None = None
    attn_implementation: str | None = None
    on_bad_values: str | None = None
    tokenisation: Mapping[str, Any] = field(default_factory=dict)
    made_with: Mapping[str, Any] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    json: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, about: Mapping[str, Any]) -> ShardDescription:
        """Return what a shard's metadata says; never raises: what is malformed counts as not said."""
        return cls(
            taps=_taps(about.get("taps")),
            model=_object(about.get("model")),
            compute_dtype=_word(about.get("compute_dtype")),
            store_dtype=_word(about.get("store_dtype")),
            mode=_word(about.get("mode")),
            attn_implementation=_word(about.get("attn_implementation")),
            on_bad_values=_word(about.get("on_bad_values")),
            tokenisation=_object(about.get("tokenisation")),
            made_with=_object(about.get("made_with")),
            sources=_words(about.get("sources")),
            json=about,
        )

    def require_taps(self, path: object) -> TapsDescription:
        """Return the taps; raises UsageError naming `path` where the header does not say which layers it holds."""
        if self.taps is None:
            raise UsageError(f"{path}: its shards do not say which layers they hold; capture or import them again.")
        return self.taps

    @property
    def torch_compute_dtype(self) -> torch.dtype | None:
        """Return the dtype that the model computed in; None where the header does not say."""
        found = getattr(torch, self.compute_dtype, None) if self.compute_dtype else None
        return found if isinstance(found, torch.dtype) else None

    def states(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[StoredState, ...]:
        """Return the states among columns of these shapes, the first dimension left out: slots in order, norm states last."""
        found = []
        if AUX in shapes:
            found += self._slots(shapes[AUX][0])
        n = self.taps.n if self.taps else None
        if PRE_NORM in shapes:
            found.append(StoredState("pre-norm", PRE_NORM, None, n))
        if POST_NORM in shapes:
            found.append(StoredState("post-norm", POST_NORM, None, n, normed=True))
        return tuple(found)

    def _slots(self, K: int) -> list[StoredState]:
        taps = self.taps
        if taps is None or len(taps.boundaries) != K:
            return [StoredState(f"slot {slot}", AUX, slot, None) for slot in range(K)]
        return [StoredState(taps.labels[slot], AUX, slot, taps.boundaries[slot]) for slot in range(K)]


def _taps(value: object) -> TapsDescription | None:
    try:
        return TapsDescription.from_json(value) if isinstance(value, Mapping) else None
    except (KeyError, TypeError, ValueError):
        return None


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _word(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _words(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()
