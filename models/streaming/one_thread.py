"""Keep torch's work in one thread off the cores on which a forward computes in another."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch


@contextmanager
def in_one_thread() -> Iterator[None]:
    """Compute in the calling thread alone inside the block; other threads keep their teams.

    Copies of weights that spread over a second team of OpenMP threads wait for each other wherever cores are busy: with two busy
    cores a layer of 128 experts took more than 10 times the processor time. `torch.set_num_threads` would change MKL's threads
    for the whole process, and with them the bits of matmuls. Does nothing where torch was built without OpenMP.
    """
    openmp = _openmp()
    if openmp is None:
        yield
        return
    before = torch.get_num_threads()  # also sets up this thread, which torch would do at its first operation
    openmp.omp_set_num_threads(1)
    try:
        yield
    finally:
        openmp.omp_set_num_threads(before)


@cache
def _openmp() -> Any:
    """Return the library whose OpenMP functions torch's own code calls, or None."""
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        path = Path(torch.__file__).parent / "lib" / name
        try:
            library = ctypes.CDLL(str(path))
            library.omp_set_num_threads.argtypes = [ctypes.c_int]
        except (OSError, AttributeError):  # another system, or a build without OpenMP
            continue
        return library
    return None
