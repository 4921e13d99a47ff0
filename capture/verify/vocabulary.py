"""Samples whose token ids the model has: others cannot be compared, and are wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from ...models.call import input_embedding
from ..store import Finding
from .chosen import ChosenSample


def known_ids(samples: Iterable[ChosenSample], rows: int | None, strange: list[Finding]) -> Iterator[ChosenSample]:
    """Yield the samples whose ids are all below `rows`; add a finding to `strange` for each of the others."""
    if rows is None:
        yield from samples
        return
    for sample in samples:
        ids, name = sample.input_ids, sample.name
        wrong = ((ids < 0) | (ids >= rows)).nonzero()
        if not len(wrong):
            yield sample
            continue
        token = int(wrong[0])
        what = f"id {int(ids[token])} at token {token} is none of the model's, which are 0..{rows - 1}; not compared"
        strange.append(Finding(str(name.path), name.sample_id, "input_ids", what, "error", "model"))


def vocabulary_of(module: nn.Module | None) -> int | None:
    """Return the rows of an embedding or of an output projection; None where they cannot be told."""
    weight = getattr(module, "weight", None)
    return None if weight is None or weight.ndim != 2 else int(weight.shape[0])


def vocabulary_of_model(model: nn.Module) -> int | None:
    """Return how many token ids the input embedding of `model` has; None where it shows none."""
    return vocabulary_of(input_embedding(model))
