"""The place of a model's files: a folder here, the hub's cache, or a hub that answers."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from transformers.utils import cached_file

_SECONDS = 5.0


def unreachable(name: str) -> str | None:
    """Return why no files can come from `name`, or None if they may.

    The hub's own client tries for half a minute before it says so of a mistyped folder on a machine without a network.
    """
    if Path(name).is_dir():
        return None
    if Path(name).exists():
        return f"expected a folder or a hub id; {name} is a file"
    try:
        validate_repo_id(name)
    except HFValidationError:
        return f"expected a folder or a hub id; there is no folder {name}, and a hub id looks like name or org/name"
    cached = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model")
    if cached.is_dir() or constants.HF_HUB_OFFLINE or getproxies():
        return None
    hub = urlsplit(constants.ENDPOINT)
    try:
        port = hub.port or (80 if hub.scheme == "http" else 443)
        socket.create_connection((hub.hostname or "", port), timeout=_SECONDS).close()
    except OSError as error:
        return (
            f"expected a folder or a hub id; there is no folder {name}, no such model in the hub's cache here, and the hub "
            f"({hub.hostname}) cannot be reached: {error}"
        )
    return None


def file_of(name: str, revision: str | None, file: str) -> Path | None:
    """Return the path of a model's file, in its folder or in the hub's cache; None where there is none."""
    folder = Path(name)
    if folder.is_dir():
        return folder / file if (folder / file).exists() else None
    found: str | None = cached_file(
        name,
        file,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)
