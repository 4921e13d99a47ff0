"""The output folder in the hands of every process of a run, and of no other run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..store import OutputFolder
from .ranks import Ranks

# A network file system may show a name that another node made this much later (its folder caches live a minute by default).
_SHOWN_WITHIN_S = 90.0
_LOOK_EVERY_S = 0.5


@contextmanager
def shared_folder(
    folder: OutputFolder, ranks: Ranks, prepare: Callable[[], list[int]], check_stop: Callable[[], None]
) -> Iterator[list[int]]:
    """`prepare` in the first rank, which has the folder alone until then; its answer on every rank, with the folder held by all.

    While one rank lives, whichever, no other run gets into the folder: so no shard ever has two writers.

    Raises:
        FolderLockedError: another run holds the folder, or took it when the first rank died before this one came to it.
    """
    if not ranks.is_first:
        first = ranks.agreed("the folder", dict, check_stop)
        with folder.join(first["claim"]):
            yield first["left"]
        return
    with folder.lock() as lock:
        left = prepare()
        if ranks.size > 1:
            lock.share()
        yield ranks.agreed("the folder", lambda: {"claim": lock.claim, "left": left}, check_stop)["left"]


def wait_for_names(folder: OutputFolder, shards: int, check_stop: Callable[[], None]) -> None:
    """Until `shards` sealed shards are seen from this node, or long enough for the rest to be missed."""
    end = time.monotonic() + _SHOWN_WITHIN_S
    while folder.sealed_names() < shards and time.monotonic() < end:
        check_stop()
        time.sleep(_LOOK_EVERY_S)
