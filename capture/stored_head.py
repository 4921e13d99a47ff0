"""OUT/head on its way to disk: the system's refusals told with the file's name."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ..models.head import WEIGHTS_FILE, HeadError, has_head, head_bytes, require_whole_head, save_head
from .store.diskio import file_error

_OS_ERROR = re.compile(r"os error (\d+)")


def write_head(
    folder: Path, model: Any, norm_path: str | None, *, trust_remote_code: bool = False, write: bool = True
) -> None:
    """Write the head of `model` as `save_head` does.

    Raises:
        HeadError: weights are offloaded, or the norm, loaded again, gives other values.
        DiskFullError, FileAccessError: the system refused to write a file.
    """
    try:
        save_head(folder, model, norm_path, trust_remote_code=trust_remote_code, write=write)
    except OSError as error:
        raise file_error(folder / WEIGHTS_FILE, "written", error, head_bytes(model, norm_path)) from error
    except SafetensorError as error:
        # The library is written in another language and has but words for what the system said.
        said = _OS_ERROR.search(str(error))
        if said is None:
            raise
        number = int(said.group(1))
        refused = OSError(number, os.strerror(number))
        raise file_error(folder / WEIGHTS_FILE, "written", refused, head_bytes(model, norm_path)) from error


def head_fault(folder: Path) -> str | None:
    """Return why the head in `folder` must be written (missing, or changed on disk); None for a whole one."""
    if not has_head(folder):
        return "there is none"
    try:
        require_whole_head(folder)
    except HeadError as error:
        return str(error)
    return None
