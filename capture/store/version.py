"""The versions of our files, and the one refusal of those of a later release."""

from pathlib import Path

from .errors import NewerFormatError

FORMAT_VERSION = 1
PLAN_VERSION = 1


def require_version(path: Path, found: object, known: int) -> None:
    """See that a whole file, one whose own checksum holds, is of the version that this release reads.

    Raises:
        NewerFormatError: a later release wrote it. ValueError: anything else that is not `known`.
    """
    message = f"format version {found}, this release reads {known}"
    if isinstance(found, int) and found > known:
        raise NewerFormatError(f"{path}: {message}; read it with the release that wrote it. It stays as it is.")
    if found != known or isinstance(found, bool):
        raise ValueError(message)
