"""Memory that a forward on the CPU frees, kept for the next one instead of given back to the system.

glibc gives the top of its heap back whenever a few megabytes of it are free, and asks for every large block anew. The states
that a layer makes are then freshly mapped pages each time, and the system clears every page first: on a small model that took
a quarter of the time of a forward, and more. What is kept grows, though: batches of ever other sizes leave holes that the next
one cannot use. So from time to time all that is free goes back after all.
"""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .process_setting import ProcessSetting

# Of glibc's malloc.h: the names are in its manual, under "Malloc Tunable Parameters".
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_KEPT, _ALL_FREE = 1 << 30, 2**31 - 1
# How far glibc's own thresholds grow in a process that has freed large blocks, and how far older versions let them be set.
_MMAP_LIMIT, _TRIM_LIMIT = 32 << 20, 64 << 20
# A forward after it finds new pages: of the order of 30 ms for a model of 135 million parameters.
TIDY_EVERY_S = 5.0
_ITS_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


class KeptMemory:
    """Freed memory that a process keeps for its next allocation."""

    def __init__(self) -> None:
        self._tidied = time.monotonic()

    def tidy(self) -> None:
        """Between two forwards: give back what is free, once in `TIDY_EVERY_S` seconds and not at any other call."""
        if time.monotonic() - self._tidied >= TIDY_EVERY_S:
            ctypes.CDLL(None).malloc_trim(0)
            self._tidied = time.monotonic()


@contextmanager
def kept_memory(device: torch.device) -> Iterator[KeptMemory | None]:
    """Inside the block this process keeps the memory it frees; what is left of it goes back to the system at the end.

    Yields what is kept, None where it is all as ever.
    Of use where forwards run on the CPU, so nothing is done for another device, nor where malloc is not glibc's or has been set
    up by its own environment variables. Blocks may be nested and may be open in several threads; the last one to end counts.
    """
    if device.type != "cpu" or platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _ITS_VARIABLES):
        yield None
        return
    with _KEEPING.held():
        yield KeptMemory()


def _keep() -> None:
    libc = ctypes.CDLL(None)
    if not libc.mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT):
        libc.mallopt(_MMAP_THRESHOLD, _MMAP_LIMIT)
    libc.mallopt(_TRIM_THRESHOLD, _ALL_FREE)


def _give_back() -> None:
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, _MMAP_LIMIT)
    libc.mallopt(_TRIM_THRESHOLD, _TRIM_LIMIT)
    libc.malloc_trim(0)


_KEEPING = ProcessSetting(_keep, _give_back)
