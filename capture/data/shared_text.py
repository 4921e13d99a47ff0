"""What two texts share at their ends."""

from .template import Span


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
    """The span widened to the whole text where that stands there verbatim, and whether it does not."""
    start, end = span
    if text is None or rendered[start:end] == text:
        return span, False
    if start == end or not text:
        return span, True
    at = rendered.find(text, max(0, end - len(text)), start + len(text))
    return (span, True) if at < 0 else ((at, at + len(text)), False)
