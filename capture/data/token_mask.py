"""Character spans to a mask over tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .template import Span


@dataclass(frozen=True, eq=False)
class TokenMask:
    """`loss_mask`: (S,) uint8. `straddled`: tokens that lie across an edge of a span and are left out."""

    loss_mask: npt.NDArray[np.uint8]
    straddled: int


def mask_of_spans(text: str, offsets: npt.NDArray[np.int64], spans: Sequence[Span]) -> TokenMask:
    """Marks each token that starts inside a span.

    `offsets`: (S, 2) int64, first character of each token and one past its last, in `text`.
    A token that starts before a span holds characters the model does not write there: left out, and counted. One that
    reaches past the end is kept where the rest is white space (a mark that swallows its newline), else left out too.
    """
    starts, ends = offsets[:, 0], offsets[:, 1]
    mask = np.zeros(len(offsets), np.uint8)
    straddled = 0
    for start, end in spans:
        inside = (starts >= start) & (starts < end)
        over = [int(row) for row in np.flatnonzero(inside & (ends > end)) if text[end : ends[row]].strip()]
        inside[over] = False
        mask[inside] = 1
        straddled += len(over) + int(((starts < start) & (ends > start)).sum())
    return TokenMask(mask, straddled)
