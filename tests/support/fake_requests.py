"""Requests and batches as auxiliary outputs see them, with nothing behind them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


class RecordingSink:
    """Notes every append, as (first position, name to list of values)."""

    def __init__(self) -> None:
        self.appends: list[tuple[int, dict[str, list[object]]]] = []

    def append(self, first_position: int, rows: Mapping[str, Tensor]) -> None:
        self.appends.append((first_position, {name: value.tolist() for name, value in rows.items()}))


@dataclass
class FakeRequest:
    rid: str = "r"
    output_ids: list[int] = field(default_factory=list)
    finished_len: int | None = None
    aborted: bool = False
    rows: RecordingSink = field(default_factory=RecordingSink)


@dataclass
class FakeBatch:
    reqs: list[FakeRequest]
