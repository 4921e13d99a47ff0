"""One stretch of work as a person wants to know it: how far, how fast, how much longer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ..progress import Work
from .tables import size


@dataclass
class Stretch:
    """Counts of one stretch, and what they mean in words.

    count, tokens: done, those of an earlier run among them, which say nothing about speed. written: bytes.
    """

    work: Work
    written: int = 0
    rejected: int = 0
    count: int = field(init=False)
    tokens: int = field(init=False)
    _start: float = field(init=False)

    def __post_init__(self) -> None:
        self.count, self.tokens, self._start = self.work.done, self.work.done_tokens, time.monotonic()

    def add(self, count: int, tokens: int, written: int, rejected: int) -> None:
        self.count += count
        self.tokens += tokens
        self.written += written
        self.rejected += rejected

    @property
    def fraction(self) -> float | None:
        """What is done of it, by tokens where their number is known: samples of one length come together."""
        return self._share(self.count, self.tokens)

    @property
    def seconds_left(self) -> float | None:
        now, before = self.fraction, self._share(self.work.done, self.work.done_tokens)
        if now is None or before is None or now <= before:
            return None
        return self._seconds * max(1 - now, 0) / (now - before)

    def words(self, *, short: bool = False) -> list[str]:
        """How far, how much longer, how fast, what is rejected and written; what there is nothing to say of is left out.

        short: as little text as tells it, for a place beside a bar.
        """
        left, tokens = self.seconds_left, self.tokens - self.work.done_tokens
        of, written = ("/", "") if short else (" of ", " written")
        total = "" if self.work.total is None else f"{of}{self.work.total:,}"
        said = [f"{self.count:,}{total} {self.work.unit}"]
        said += [f"{self.rejected:,} rejected"] if self.rejected else []
        said += [f"{duration(left)} left"] if left is not None and self.count != self.work.total else []
        said += [f"{tokens / self._seconds:,.0f} tokens/s"] if tokens else []
        said += [f"{size(self.written)}{written}"] if self.written else []
        return said

    def _share(self, count: int, tokens: int) -> float | None:
        if self.work.tokens:
            return tokens / self.work.tokens
        return count / self.work.total if self.work.total else None

    @property
    def _seconds(self) -> float:
        return max(time.monotonic() - self._start, 1e-9)


def duration(seconds: float) -> str:
    """A time in the two units that matter: ``40 s``, ``12 min``, ``3 h 5 min``."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
