"""Image parts of a conversation to local files and images."""

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ....models.errors import UsageError
from ..errors import RecordError
from ..records.items import ImageFile

MAX_IMAGE_BYTES = 256 << 20
# The names under which a chat template's image part tells its file.
_FILE_FIELDS = ("image", "path", "url")
_REMOTE = ("http", "https", "ftp", "s3", "gs", "hf", "data")


def image_path(part: Mapping[str, Any], place: int, source: str) -> Path:
    """Return the file of an image part of message `place`; a relative one lies beside the source of its row.

    Raises RecordError where the part names no file, or one that is not on this machine.
    """
    named = [part[field] for field in _FILE_FIELDS if part.get(field) is not None]
    if len(named) != 1 or not isinstance(named[0], str) or not named[0]:
        found = "none" if not named else f"a {type(named[0]).__name__}" if len(named) == 1 else f"{len(named)}"
        raise RecordError("bad_content", f"expected the image of message {place} to name its file once; found {found}")
    parts = urlsplit(named[0])
    if parts.scheme.lower() in _REMOTE:
        raise RecordError(
            "image_not_local",
            f"expected the image of message {place} as a file on this machine; found {named[0][:80]!r}; fetch it first",
        )
    path = Path(unquote(parts.path) if parts.scheme.lower() == "file" else named[0])
    folder = Path(source)
    return path if path.is_absolute() else (folder if folder.is_dir() else folder.parent) / path


def read_image(path: Path) -> tuple[ImageFile, Any]:
    """Return the file with its hash, and the image in RGB as transformers loads it.

    Raises RecordError where the file cannot be read or is no image, UsageError without the extra `images`.
    """
    image_module, load_image = _libraries()
    try:
        _require_an_image_file(path)
        data = path.read_bytes()
        with image_module.open(io.BytesIO(data)) as opened:
            image = load_image(opened)
    except (OSError, ValueError, SyntaxError, EOFError, image_module.DecompressionBombError) as error:
        raise RecordError("bad_image", f"expected an image at {path}; it cannot be read: {error}") from error
    return ImageFile(str(path), hashlib.sha256(data).hexdigest()), image


def _require_an_image_file(path: Path) -> None:
    """Raise RecordError for a device, a pipe or a file that is too large, before any of it is read."""
    if path.exists() and not path.is_file():
        raise RecordError("bad_image", f"expected an image at {path}; found no regular file")
    size = path.stat().st_size
    if size > MAX_IMAGE_BYTES:
        raise RecordError(
            "bad_image", f"expected an image of at most {MAX_IMAGE_BYTES >> 20} MiB at {path}; found {size:,} bytes"
        )


def _libraries() -> tuple[Any, Any]:
    try:
        from PIL import Image
    except ImportError as error:
        raise UsageError("rows with images need pillow: pip install 'hiddentap[images]'") from error
    from transformers.image_utils import load_image

    return Image, load_image
