"""Contenders run in turn, round after round, so that whatever else the machine does touches all of them alike."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class Stopwatch:
    """Seconds of the work inside `with stopwatch.running():`, what the device still had to do included."""

    device: torch.device
    seconds: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        synchronize(self.device)
        start = time.perf_counter()
        yield
        synchronize(self.device)
        self.seconds += time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@dataclass(frozen=True)
class Contender:
    """One way of doing the work: `run` does it once and returns its seconds; `every`: in which rounds it takes part."""

    name: str
    run: Callable[[], float]
    every: int = 1
    seconds: dict[int, float] = field(default_factory=dict)


def run_rounds(title: str, contenders: Sequence[Contender], rounds: int) -> dict[str, dict[int, float]]:
    """Seconds by name and round. Each round begins with another contender."""
    for number in range(rounds):
        shift = number % len(contenders)
        for contender in [*contenders[shift:], *contenders[:shift]]:
            if number % contender.every == 0:
                contender.seconds[number] = contender.run()
                tell(f"{title}, round {number + 1} of {rounds}: {contender.name}: {contender.seconds[number]:.2f} s")
    return {contender.name: contender.seconds for contender in contenders}


def tell(text: str) -> None:
    """Progress goes to stderr: stdout holds the table alone."""
    print(text, file=sys.stderr, flush=True)
