"""Layer ids as values: what an id means is named, checked and converted here and nowhere else.

Inside the package only *boundaries* are used: boundary k is the residual stream after k decoder layers, 0 the embeddings,
n the output of the last layer before the final norm. Two conventions name them at the edges:

- ``layer_output`` (the default; DSPARK, DFlash, SpecForge): id k is the output of 0-based decoder layer k, so boundary k+1;
- ``boundary`` (vLLM, speculators, EAGLE-3's own code): id k is boundary k.

What each system's own ids mean beyond that, and conversions between them, is in `models.id_systems`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import get_args

from .choices import Algorithm as Algorithm
from .choices import Convention as Convention
from .errors import HiddentapError, UsageError

CONVENTIONS: tuple[str, ...] = get_args(Convention)


class LayerIdError(UsageError):
    """Layer ids that name no set of decoder layers."""


class LayerIdTypeError(HiddentapError, TypeError):
    """A layer id that is no plain integer."""


def check_layer_ids(layer_ids: Sequence[int] | None, n: int, *, algorithm: str) -> tuple[int, ...]:
    """Return `layer_ids` as a tuple once they are known to be good ``layer_output`` ids.

    Args:
        layer_ids: 0-based decoder layers, unique and strictly increasing, each in 0..n-1.
        n: number of decoder layers.
        algorithm: the name the messages begin with, such as ``"DSPARK"``.

    Raises:
        LayerIdError: None, empty, not strictly increasing, or outside the decoder.
        LayerIdTypeError: an id that is not a plain integer (bool, float and str are not).
    """
    ids = check_plain_ids(layer_ids, algorithm=algorithm)
    invalid = [i for i in ids if not 0 <= i < n]
    if invalid:
        raise LayerIdError(
            f"{algorithm} target layer_ids are outside the decoder range: {invalid}; num_hidden_layers={n}."
        )
    return ids


def check_plain_ids(layer_ids: Sequence[int] | None, *, algorithm: str) -> tuple[int, ...]:
    """Return `layer_ids` as a tuple once they are known to be plain integers, some, unique and strictly increasing.

    Raises:
        LayerIdError, LayerIdTypeError: as `check_layer_ids`, whose range is not looked at.
    """
    if layer_ids is None:
        raise LayerIdError(f"{algorithm} requires explicit layer_ids for aux hidden capture.")
    ids = _plain_integers(layer_ids, algorithm)
    _check_order(ids, algorithm)
    return ids


def to_boundaries(layer_ids: Sequence[int] | None, n: int, convention: Convention) -> tuple[int, ...]:
    """Return the boundaries, each 0..n and strictly increasing, that `layer_ids` name under `convention`.

    Raises:
        LayerIdError, LayerIdTypeError: as `check_layer_ids`; under ``boundary`` the range is 0..n.
    """
    if convention == "layer_output":
        return tuple(i + 1 for i in check_layer_ids(layer_ids, n, algorithm="DSPARK"))
    if convention != "boundary":
        raise LayerIdError(f"unknown layer-id convention {convention!r}; expected one of {', '.join(CONVENTIONS)}.")
    ids = check_plain_ids(layer_ids, algorithm="DSPARK")
    invalid = [i for i in ids if not 0 <= i <= n]
    if invalid:
        raise LayerIdError(f"boundary ids are outside 0..{n}: {invalid}; num_hidden_layers={n}.")
    return ids


def from_boundaries(boundaries: Sequence[int], convention: Convention) -> tuple[int, ...]:
    """Return the ids of `boundaries` under `convention`; the inverse of `to_boundaries`.

    Raises:
        LayerIdError: boundary 0 (the embeddings) under ``layer_output``, where no id names it.
    """
    if convention == "boundary":
        return tuple(boundaries)
    if 0 in boundaries:
        raise LayerIdError("boundary 0 (the embeddings) has no id under the layer_output convention; use boundary.")
    return tuple(b - 1 for b in boundaries)


def _plain_integers(layer_ids: Sequence[int], algorithm: str) -> tuple[int, ...]:
    if isinstance(layer_ids, str) or not hasattr(layer_ids, "__iter__"):
        raise LayerIdTypeError(f"{algorithm} target layer_ids must be a list of plain integers; got {layer_ids!r}.")
    for value in layer_ids:
        if type(value) is not int:
            raise LayerIdTypeError(
                f"{algorithm} target layer_ids must be plain integers; got {value!r} ({type(value).__name__})."
            )
    return tuple(layer_ids)


def _check_order(ids: tuple[int, ...], algorithm: str) -> None:
    if not ids:
        raise LayerIdError(f"{algorithm} requires at least one target layer for aux hidden capture.")
    if any(b <= a for a, b in itertools.pairwise(ids)):
        raise LayerIdError(f"{algorithm} target layer_ids must be unique and strictly increasing. Got {list(ids)}.")
