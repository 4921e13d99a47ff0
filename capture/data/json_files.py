"""Rows of JSON files: lines, gzipped lines, and whole documents.

Lines end at the byte `\\n` and nowhere else: U+2028, U+0085 and a bare carriage return are text or JSON white space.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from .raw_row import RawRow
from .source_error import SourceError

_BOM = b"\xef\xbb\xbf"
_JSON_SPACE = " \t\r\n"


def json_lines(source: str, path: Path) -> Iterator[RawRow]:
    """The rows of a `.jsonl` or `.jsonl.gz` file (all gzip members), one per line that is not blank, streamed.

    Raises SourceError where the file cannot be read to its end.
    """
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                text = line.removeprefix(_BOM) if number == 1 else line
                if text.strip(_JSON_SPACE.encode()):
                    yield RawRow(source, number, text)
    except (OSError, EOFError, zlib.error) as error:
        raise SourceError(
            f"expected {source} to be readable to its end; found a damaged file ({error}); restore it and run again"
        ) from error


def json_document(source: str, path: Path) -> Iterator[RawRow]:
    """The rows of a `.json` file: the items of its list, or its one object; the line of a row is its place, from 1.

    Raises SourceError where the document is not UTF-8 or its list cannot be cut into items.
    """
    try:
        text = path.read_bytes().removeprefix(_BOM).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"expected {source} to be a readable UTF-8 file; found {error}; restore it") from error
    for place, item in enumerate(_items(source, text), start=1):
        yield RawRow(source, place, item.encode("utf-8"))


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.name.endswith(".gz") else path.open("rb")


def _items(source: str, text: str) -> Iterator[str]:
    """The text of each item. Items are only measured here: each is parsed on its own later, so one bad key or
    number rejects that item and not the file."""
    at = _skip_space(text, 0)
    if text[at : at + 1] != "[":
        yield text[at : _item_end(source, text, at)]
        _require_nothing_after(source, text, _item_end(source, text, at))
        return
    at = _skip_space(text, at + 1)
    while text[at : at + 1] != "]":
        end = _item_end(source, text, at)
        yield text[at:end]
        at = _skip_space(text, end)
        if text[at : at + 1] == ",":
            at = _skip_space(text, at + 1)
        elif text[at : at + 1] != "]":
            raise SourceError(f"expected ',' or ']' at character {at} of {source}; found {text[at : at + 20]!r}")
    _require_nothing_after(source, text, at + 1)


def _item_end(source: str, text: str, at: int) -> int:
    # parse_int=str: an integer of 5,000 digits must reject its item later, not the file here.
    try:
        _, end = json.JSONDecoder(parse_int=str).raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        raise SourceError(
            f"expected a JSON list of rows, or one row, in {source}; found {error}; "
            f"mend the file, or write one row per line as .jsonl, where a bad row costs only itself"
        ) from error
    return end


def _require_nothing_after(source: str, text: str, at: int) -> None:
    if _skip_space(text, at) != len(text):
        raise SourceError(
            f"expected one JSON document in {source}; found more text at character {_skip_space(text, at)}; "
            f"if it holds one row per line, name it .jsonl"
        )


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in _JSON_SPACE:
        at += 1
    return at
