"""What the process keeps of freed memory, seen from the system's side."""

import os
import platform
import subprocess
import sys

import pytest
import torch

from hiddentap.models.cpu.kept_memory import kept_memory

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's here")

# 40 states of 4 MB are freed again and again, as layers do; prints faults per round outside, inside and after the block.
ROUNDS = """
import resource, torch
from hiddentap.models.cpu.kept_memory import kept_memory

def faults():
    start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        states = [torch.ones(1 << 20) for _ in range(40)]
        del states
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start) // 5

torch.ones(8 << 20)
found = [faults()]
with kept_memory(torch.device("cpu")):
    with kept_memory(torch.device("cpu")):
        faults()
    found.append(faults())
resident = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
found += [faults(), resident]
print(*found)
"""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
ROUND_PAGES = 40 * (4 << 20) // 4096


def measured(**environment: str) -> list[int]:
    command = [sys.executable, "-c", ROUNDS]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | environment)
    return [int(word) for word in result.stdout.split()]


def test_freed_memory_comes_back_without_faults_inside_the_block_and_goes_to_the_system_after_it() -> None:
    before, inside, after, resident = measured()
    assert before > ROUND_PAGES // 10
    assert inside < ROUND_PAGES // 100
    assert after > ROUND_PAGES // 10
    # All of the 160 MB were resident inside the block.
    held = measured(MALLOC_TRIM_THRESHOLD_=str(2**31 - 1), MALLOC_MMAP_THRESHOLD_=str(1 << 30))[3]
    assert held - resident > 100 << 20


def test_who_has_set_up_malloc_keeps_that() -> None:
    before, inside, *_ = measured(MALLOC_MMAP_THRESHOLD_="65536")
    assert inside > before // 2 > ROUND_PAGES // 3


def test_a_malloc_that_refuses_large_blocks_keeps_those_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: dict[int, int] = {}

    class OlderLibc:
        def mallopt(self, name: int, value: int) -> int:
            allowed = name != M_MMAP_THRESHOLD or value <= 32 << 20
            set_to.update({name: value} if allowed else {})
            return int(allowed)

        def malloc_trim(self, _: int) -> None:
            pass

    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("hiddentap.models.cpu.kept_memory.ctypes.CDLL", lambda _: OlderLibc())
    with kept_memory(torch.device("cpu")):
        assert set_to == {M_MMAP_THRESHOLD: 32 << 20, M_TRIM_THRESHOLD: 2**31 - 1}


def test_what_is_free_goes_back_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []
    now = [100.0]

    class Libc:
        mallopt = staticmethod(lambda _name, _value: 1)
        malloc_trim = staticmethod(trims.append)

    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("hiddentap.models.cpu.kept_memory.ctypes.CDLL", lambda _: Libc)
    monkeypatch.setattr("hiddentap.models.cpu.kept_memory.time.monotonic", lambda: now[0])
    with kept_memory(torch.device("cpu")) as memory:
        assert memory is not None
        counts = []
        for now[0] in (101.0, 104.9, 105.0, 109.9, 110.0):
            memory.tidy()
            counts.append(len(trims))
    assert counts == [0, 0, 1, 1, 2]


def test_an_error_inside_the_block_ends_it_as_well() -> None:
    with pytest.raises(RuntimeError, match="lost"), kept_memory(torch.device("cpu")):
        raise RuntimeError("lost")
    with kept_memory(torch.device("meta")) as memory:
        assert memory is None
