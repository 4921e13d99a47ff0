"""Draft tokens by prompt lookup: what followed the same tokens before."""

from collections.abc import Sequence

_LONGEST = 3


class PromptLookup:
    """Finds where the last few tokens of a request stood before, and what followed them there.

    Of several places the latest is taken, of the longest match of up to three tokens.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens to the end."""
        for token in token_ids:
            # Entered when the token behind them is known, so that the tail of the request never finds itself.
            for size in range(1, min(_LONGEST, len(self._token_ids)) + 1):
                self._next[tuple(self._token_ids[-size:])] = len(self._token_ids)
            self._token_ids.append(token)

    def draft(self, count: int) -> list[int]:
        """Return at most `count` tokens that followed the last ones before; none where they did not occur before."""
        for size in range(min(_LONGEST, len(self._token_ids)), 0, -1):
            begin = self._next.get(tuple(self._token_ids[-size:]))
            if begin is not None:
                return self._token_ids[begin : begin + count]
        return []
