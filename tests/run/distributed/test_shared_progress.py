"""Progress of several processes on one run."""

from torch.distributed import HashStore

from hiddentap.capture.progress import Done, Silent, Work
from hiddentap.capture.run.distributed.ranks import Ranks


class Told(Silent):
    """What was told."""

    def __init__(self) -> None:
        self.stretches: list[tuple[str, int | None]] = []
        self.counts = [0, 0, 0, 0]

    def started(self, work: Work) -> None:
        self.stretches.append((work.what, work.total))

    def advanced(self, done: Done) -> None:
        more = (done.count, done.tokens, done.written, done.rejected)
        self.counts = [a + b for a, b in zip(self.counts, more, strict=True)]


def test_the_first_rank_shows_what_all_did_and_the_others_nothing() -> None:
    store, shown, hidden = HashStore(), Told(), Told()
    first, second = (Ranks(rank, 2, rank, store).shared(told) for rank, told in ((0, shown), (1, hidden)))
    for rank in (first, second):
        rank.started(Work("capturing", 10, tokens=100))
    second.advanced(Done(3, 30, written=300, rejected=1))
    first.advanced(Done(2, 20, written=200))
    second.advanced(Done(1, 10, written=100))
    first.advanced(Done(1, 10, written=100))
    assert shown.stretches == [("capturing", 10)]
    assert shown.counts == [7, 70, 700, 1]
    assert (hidden.stretches, hidden.counts) == ([], [0, 0, 0, 0])


def test_what_was_done_adds_up_and_can_be_taken_apart() -> None:
    total = Done(2, 30, written=7) + Done(1, 10, rejected=1)
    assert total == Done(count=3, tokens=40, written=7, rejected=1)
    assert total - Done(2, 30, 7) == Done(1, 10, rejected=1)
