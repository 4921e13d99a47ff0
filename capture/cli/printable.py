"""Text of data for a terminal."""

from __future__ import annotations

import unicodedata

_KEPT = "\n\t"
# Marks that turn the direction of the text after them, which can make a line read as another one.
_TURNING = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def printable(text: str) -> str:
    r"""Return the text with control characters written out, such as ``\x1b``: data must not drive the terminal.

    Example:
        >>> printable("a\x1b[2J")
        'a\\x1b[2J'
    """
    return "".join(_escaped(one) if _is_control(one) else one for one in text)


def _is_control(character: str) -> bool:
    return character not in _KEPT and (unicodedata.category(character) in ("Cc", "Cs") or character in _TURNING)


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
