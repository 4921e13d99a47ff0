"""How many rejected rows end a run."""

from collections import Counter

from ...models.errors import RunError
from .items import Item, Reject

MASK_CODES = frozenset(
    {
        "marker_not_unique",
        "turn_not_found",
        "marks_misplaced",
        "content_changed",
        "unsupervised",
        "thinking_not_tagged",
        "no_kimi_turns",
    }
)
_FIRST_CHECK = 200


class RejectGate:
    """Counts items and raises RunError once the mask rules reject more than 5 % of them: a template that the rules
    cannot read would else throw most of the data away row by row. `allow_rejects` lets everything through; `strict` lets
    no reject through, whatever its reason.

    Shares are not judged before 200 rows; `finish` judges whatever was seen.
    """

    def __init__(self, allow_rejects: bool = False, *, strict: bool = False) -> None:
        self._allow = allow_rejects
        self._strict = strict
        self._rows = 0
        self._rejects: Counter[str] = Counter()
        self._first: dict[str, Reject] = {}

    def feed(self, item: Item) -> None:
        """Counts one item."""
        self._rows += 1
        if self._strict and isinstance(item, Reject):
            raise RunError(
                f"{item.source}, line {item.line}: {item.reason} (strict: the first rejected row ends the run)"
            )
        if isinstance(item, Reject) and item.code in MASK_CODES:
            self._rejects[item.code] += 1
            self._first.setdefault(item.code, item)
            if self._rows >= _FIRST_CHECK:
                self._check()

    def finish(self) -> None:
        """The check after the last item."""
        self._check()

    def _check(self) -> None:
        rejected = self._rejects.total()
        # Integers: 5 % of a count is not always a float.
        if self._allow or rejected * 20 <= self._rows:
            return
        code, count = self._rejects.most_common(1)[0]
        first = self._first[code]
        raise RunError(
            f"expected the mask rules to take at least 95 % of the rows; found {rejected} of {self._rows} rejected, "
            f"most of them ({count}) as {code}, first at {first.source}:{first.line}: {first.reason}. "
            f"Give a template with generation marks, supervise everything (--loss-on all), or let the rows go "
            f"(--allow-rejects)"
        )
