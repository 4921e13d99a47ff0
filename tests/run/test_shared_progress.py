"""Progress of several processes on one run."""

from torch.distributed import HashStore

from hiddentap.capture.progress import Silent, Work
from hiddentap.capture.run.ranks import Ranks


class Told(Silent):
    """What was told."""

    def __init__(self) -> None:
        self.stretches: list[tuple[str, int | None]] = []
        self.counts = [0, 0, 0, 0]

    def started(self, work: Work) -> None:
        self.stretches.append((work.what, work.total))

    def advanced(self, count: int = 0, tokens: int = 0, *, written: int = 0, rejected: int = 0) -> None:
        self.counts = [a + b for a, b in zip(self.counts, (count, tokens, written, rejected), strict=True)]


def test_the_first_rank_shows_what_all_did_and_the_others_nothing() -> None:
    store, shown, hidden = HashStore(), Told(), Told()
    first, second = (Ranks(rank, 2, rank, store).shared(told) for rank, told in ((0, shown), (1, hidden)))
    for rank in (first, second):
        rank.started(Work("capturing", 10, tokens=100))
    second.advanced(3, 30, written=300, rejected=1)
    first.advanced(2, 20, written=200)
    second.advanced(1, 10, written=100)
    first.advanced(1, 10, written=100)
    assert shown.stretches == [("capturing", 10)]
    assert shown.counts == [7, 70, 700, 1]
    assert (hidden.stretches, hidden.counts) == ([], [0, 0, 0, 0])
