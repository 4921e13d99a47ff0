"""Template text in pieces that stand or fall whole."""

import re
from functools import lru_cache


def atoms(text: str, added_tokens: tuple[str, ...]) -> list[str]:
    """The text cut into the tokenizer's added tokens, tags such as `<x>` or `[X]`, runs of white space, and the rest.

    Two texts that share `<` of two different tags share nothing: compared atom by atom they differ at once.
    """
    return _pattern(added_tokens).findall(text)


def common_atoms(first: str, second: str, added_tokens: tuple[str, ...]) -> int:
    """How many characters of `first` lie in the leading atoms that both texts share."""
    length = 0
    for one, other in zip(atoms(first, added_tokens), atoms(second, added_tokens), strict=False):
        if one != other:
            break
        length += len(one)
    return length


@lru_cache(maxsize=8)
def _pattern(added_tokens: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted((token for token in added_tokens if token.strip()), key=len, reverse=True)
    tokens = "".join(f"{re.escape(token)}|" for token in longest_first)
    return re.compile(rf"{tokens}<[^<>\s]{{1,64}}>|\[[^\[\]\s]{{1,64}}\]|\s+|[^\s<\[]+|[<\[]")
