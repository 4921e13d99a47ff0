"""A control group that limits the memory of a process, its page cache included."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hiddentap.models.memory import control_groups

# Of either version: the limit, and the limit of memory and swap (version 1) or of swap alone (version 2).
_LIMITS = {"memory.limit_in_bytes": "memory.memsw.limit_in_bytes", "memory.max": "memory.swap.max"}


class NoMemoryGroupError(RuntimeError):
    """Memory cannot be limited here."""


@dataclass(frozen=True)
class MemoryGroup:
    """A control group; a command that it wraps lies inside with all that it allocates and reads."""

    folder: Path

    def command(self, *command: str) -> list[str]:
        """Return `command` so that it enters the group before it starts."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs"), *command]


@contextmanager
def memory_group(limit: int) -> Iterator[MemoryGroup]:
    """Make a group of at most `limit` bytes, without swap; the block removes it.

    Raises:
        NoMemoryGroupError: no control group of the memory controller is there, or none can be made.
    """
    folder = _place() / f"hiddentap-benchmark-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        raise _refusal(f"{folder} cannot be made: {error.strerror}") from error
    try:
        _set_limit(folder, limit)
        yield MemoryGroup(folder)
    finally:
        folder.rmdir()


def _place() -> Path:
    """Return the group in which to make one: version 1, that of this process; version 2, the one around it.

    A group of version 2 that holds processes cannot hold groups with limits of their own.
    """
    own = next(control_groups(Path("/proc/self")), None)
    if own is None:
        raise _refusal("this system has no memory control groups")
    folder, _ = own
    return folder if (folder / "memory.limit_in_bytes").exists() else folder.parent


def _set_limit(folder: Path, limit: int) -> None:
    for name, swap in _LIMITS.items():
        if (folder / name).exists():
            try:
                (folder / name).write_text(str(limit))
                if (folder / swap).exists():  # else the kernel does not count swap
                    (folder / swap).write_text(str(limit if name == "memory.limit_in_bytes" else 0))
            except OSError as error:
                raise _refusal(f"{folder / name} cannot be written: {error.strerror}") from error
            return
    raise _refusal(f"{folder.parent} does not hand the memory controller on to groups inside it")


def _refusal(why: str) -> NoMemoryGroupError:
    return NoMemoryGroupError(
        f"no memory control group for the section streamed: {why}. Run it as root, or in a container that may write to "
        "/sys/fs/cgroup."
    )
