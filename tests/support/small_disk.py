"""A small file system of our own, which is gone with the process that asked for it, however that one dies."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# Mounted where only this process sees it; reading from a pipe, it lives as long as the pipe's other end does.
HOLDER = 'mount -t tmpfs -o "size=$2" tmpfs "$1" && echo mounted && exec cat'


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A new tmpfs of `size` (as mount writes it: 4m), as a folder that any process may use; skips where it cannot be mounted.

    It is mounted on the empty `folder` in a mount namespace of its own, and reached through the process that holds it: nothing
    has to be unmounted, so no failure and no kill can leave it behind.
    """
    folder.mkdir(exist_ok=True)
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", HOLDER, "sh", str(folder), size]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        holder = subprocess.Popen(command, text=True, **pipes)
    except FileNotFoundError:
        pytest.skip("no file system of our own can be mounted here: there is no unshare")
    with holder:
        if holder.stdout.readline() != "mounted\n":
            pytest.skip(f"no file system of our own can be mounted here: {holder.stderr.read().strip()}")
        try:
            yield Path(f"/proc/{holder.pid}/root{folder}")
        finally:
            holder.kill()
