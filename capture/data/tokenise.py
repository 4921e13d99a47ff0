"""Sources to samples and rejects."""

from collections.abc import Iterator, Sequence
from itertools import islice

from ...models.errors import UsageError
from .items import Item
from .options import TokeniseOptions
from .raw_row import RawRow
from .sources import read_rows
from .tokeniser import Tokeniser
from .workers import tokenise_in_workers


def tokenise(
    sources: Sequence[str], options: TokeniseOptions, *, workers: int = 0, limit: int | None = None
) -> Iterator[Item]:
    """One item per input row of the sources, in order; at most `limit` rows are read.

    With `workers` > 0 rows are tokenised in that many processes, each with one thread; the items are the same.
    Raises UsageError or SourceError at once for sources that cannot be there, and while iterating for a tokenizer that
    cannot be loaded or a source that turns out damaged.
    """
    if workers < 0 or (limit is not None and limit < 0):
        raise UsageError(f"expected workers and limit to be at least 0; found workers={workers}, limit={limit}")
    rows = islice(read_rows(sources), limit)
    return tokenise_in_workers(rows, options, workers) if workers else _tokenise_here(rows, options)


def _tokenise_here(rows: Iterator[RawRow], options: TokeniseOptions) -> Iterator[Item]:
    tokeniser = Tokeniser(options)
    return (tokeniser.item(row) for row in rows)
