"""Records of JSON files: lines, gzipped lines and whole documents, each record parsed strictly on its own.

Lines end at the byte `\\n` and nowhere else: U+2028, U+0085 and a bare carriage return are text or JSON white space.
"""

import gzip
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from ..errors import RecordError, SourceError
from .items import RawRecord


def parse_object(payload: bytes) -> Mapping[str, Any]:
    """Return the object a row's JSON text holds.

    Raises RecordError for text that is not UTF-8 or not JSON, NaN and infinite numbers, a key given twice, nesting or
    integers beyond the parser's limits, and JSON that is no object.
    """
    try:
        value = _DECODER.decode(payload.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RecordError("not_utf8", f"expected UTF-8; found {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise RecordError("bad_json", f"expected one JSON object; found {_fault(error)}") from error
    except RecursionError as error:
        raise RecordError(
            "too_deep", "expected JSON within the parser's nesting limit; found deeper nesting"
        ) from error
    except ValueError as error:
        raise RecordError("number_too_long", f"expected numbers within the parser's limit; found {error}") from error
    if not isinstance(value, dict):
        raise RecordError("not_an_object", f"expected a JSON object; found a {type(value).__name__}")
    return value


def _fault(error: json.JSONDecodeError) -> str:
    # The parser counts lines of its own, which a reader would take for lines of the source.
    return f"{error.msg[0].lower()}{error.msg[1:]} at character {error.pos + 1} of the row"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise RecordError("duplicate_key", f"expected each key once; found {repeated!r} twice in one object")
    return found


def _float(literal: str) -> float:
    value = float(literal)
    if not math.isfinite(value):
        raise RecordError("bad_number", f"expected finite numbers; found {literal[:40]}")
    return value


def _constant(literal: str) -> float:
    raise RecordError("bad_number", f"expected finite numbers; found {literal}")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_constant=_constant)


_BOM = b"\xef\xbb\xbf"
_JSON_SPACE = " \t\r\n"
MAX_RECORD_BYTES = 256 << 20


def json_lines(source: str, path: Path) -> Iterator[RawRecord]:
    """Yield the rows of a `.jsonl` or `.jsonl.gz` file (all gzip members), one per line that is not blank, streamed.

    Raises SourceError where the file cannot be read to its end.
    """
    try:
        with _open(path) as file:
            _require_content(source, path)
            for number, line in enumerate(_lines(source, file), start=1):
                text = line.removeprefix(_BOM) if number == 1 else line
                if text.strip(_JSON_SPACE.encode()):
                    yield RawRecord(source, number, text)
    except (OSError, EOFError, zlib.error) as error:
        raise SourceError(
            f"expected {source} to be readable to its end; found a damaged file ({error}); restore it and run again"
        ) from error


def json_document(source: str, path: Path) -> Iterator[RawRecord]:
    """Yield the rows of a `.json` file: the items of its list, or its one object; the line of a row is its place, from 1.

    Raises SourceError where the document is not UTF-8 or its list cannot be cut into items.
    """
    try:
        text = path.read_bytes().removeprefix(_BOM).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"expected {source} to be a readable UTF-8 file; found {error}; restore it") from error
    for place, item in enumerate(_items(source, text), start=1):
        yield RawRecord(source, place, item.encode("utf-8"))


def _require_content(source: str, path: Path) -> None:
    """Raise SourceError for a compressed file of no bytes: an empty one has a header, so this one was cut."""
    if path.name.endswith(".gz") and path.stat().st_size == 0:
        raise SourceError(f"expected {source} to be gzip; found a file of 0 bytes; restore it and run again")


def _lines(source: str, file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file; one longer than any record ends the run before it fills the memory, as a gzip bomb would."""
    number = 0
    while line := file.readline(MAX_RECORD_BYTES + 1):
        number += 1
        if len(line) > MAX_RECORD_BYTES:
            raise SourceError(
                f"expected lines of at most {MAX_RECORD_BYTES >> 20} MiB in {source}; found a longer one at line {number}; "
                "take it out, or write one row a line"
            )
        yield line


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.name.endswith(".gz") else path.open("rb")


def _items(source: str, text: str) -> Iterator[str]:
    """Yield the text of each item.

    Items are only delimited here; each is parsed on its own later, so one bad key or number rejects that item alone.
    """
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
