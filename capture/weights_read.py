"""Every byte of a model's weights, read once, with progress: minutes for a large model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..models.checkpoint import weight_sums
from .progress import Done, Progress, Work

_MB = 10**6
# Fewer are read in about a second, of which nothing need be reported.
_REPORTED_BYTES = 2 * 10**9


def checked_weight_sums(
    folder: Path, progress: Progress, check_stop: Callable[[], None] = lambda: None
) -> dict[str, str]:
    """Return the CRC-32 of each weight file in `folder` by name, as `models.checkpoint.weight_sums`, and report how far it is.

    check_stop: called several times a second; may raise.
    """
    told: list[int] = []

    def read(done: int, total: int) -> None:
        if total < _REPORTED_BYTES:
            return
        if not told:
            progress.started(Work("checksums of the weights", total // _MB, unit="MB"))
        progress.advanced(Done(done // _MB - sum(told)))
        told.append(done // _MB - sum(told))

    return weight_sums(folder, check_stop, read)
