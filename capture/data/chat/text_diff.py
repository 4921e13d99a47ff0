"""Differences of two renderings: atoms of template text, common prefixes and suffixes."""

import re
from functools import lru_cache

Span = tuple[int, int]
_TAGS = re.compile(r"(\s|<[^<>\s]{1,64}>|\[[^\[\]\s]{1,64}\])*")


def atoms(text: str, added_tokens: tuple[str, ...]) -> list[str]:
    """Return the text cut into the tokenizer's added tokens, tags such as `<x>` or `[X]`, runs of white space, and the rest.

    Two texts that share `<` of two different tags share nothing: compared atom by atom they differ at once.
    """
    return _pattern(added_tokens).findall(text)


def common_atoms(first: str, second: str, added_tokens: tuple[str, ...]) -> int:
    """Return how many characters of `first` lie in the leading atoms that both texts share."""
    length = 0
    for one, other in zip(atoms(first, added_tokens), atoms(second, added_tokens), strict=False):
        if one != other:
            break
        length += len(one)
    return length


def only_tags(text: str, added_tokens: tuple[str, ...]) -> bool:
    """Return whether the text holds nothing but white space, added tokens and tags."""
    for token in added_tokens:
        text = text.replace(token, "")
    return _TAGS.fullmatch(text) is not None


@lru_cache(maxsize=8)
def _pattern(added_tokens: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted((token for token in added_tokens if token.strip()), key=len, reverse=True)
    tokens = "".join(f"{re.escape(token)}|" for token in longest_first)
    return re.compile(rf"{tokens}<[^<>\s]{{1,64}}>|\[[^\[\]\s]{{1,64}}\]|\s+|[^\s<\[]+|[<\[]")


def shared_before(first: str, second: str) -> int:
    """Length of the common prefix, by halving: comparing slices is far cheaper than characters."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def shared_after(first: str, second: str) -> int:
    """Length of the common suffix, by halving."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[len(first) - middle : len(first) - low] == second[len(second) - middle : len(second) - low]:
            low = middle
        else:
            high = middle - 1
    return low


def whole_text(rendered: str, span: Span, text: str | None) -> tuple[Span, bool]:
    """Return the span widened to the whole text where that stands there verbatim, and whether it does not."""
    start, end = span
    if text is None or rendered[start:end] == text:
        return span, False
    if start == end or not text:
        return span, True
    at = rendered.find(text, max(0, end - len(text)), start + len(text))
    return (span, True) if at < 0 else ((at, at + len(text)), False)
