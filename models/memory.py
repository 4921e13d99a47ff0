"""Memory that a process can still allocate."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

_PROC = Path("/proc/self")


class _Files(NamedTuple):
    """Names of a control group's files: what it may use, and what it uses."""

    limit: str
    used: str


# By the type of the file system that control groups of version 2 and 1 are mounted as.
_VERSIONS = {
    "cgroup2": _Files("memory.max", "memory.current"),
    "cgroup": _Files("memory.limit_in_bytes", "memory.usage_in_bytes"),
}


def available_bytes(device: torch.device) -> int:
    """Return the bytes of memory on `device` that can still be taken.

    On the CPU: within the limits of the control group that the process is in, and of every group around it.
    """
    if device.type != "cpu":
        free, _ = torch.accelerator.get_memory_info(device)
        return int(free)
    limits = (_left(folder, files) for folder, files in control_groups(_PROC))
    return min([_free_of_the_machine(), *(left for left in limits if left is not None)])


def accelerator_bytes() -> int:
    """Return the bytes that can still be taken on all accelerators of this machine together; 0 without any."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return 0
    return sum(available_bytes(torch.device(kind.type, index)) for index in range(torch.accelerator.device_count()))


def _free_of_the_machine() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux: pages that nobody uses, without those a cache would give back
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def control_groups(proc: Path) -> Iterator[tuple[Path, _Files]]:
    """Yield the folder of the memory control group that the process is in, then those around it, up to the mount."""
    try:
        mounts = (proc / "mountinfo").read_text().splitlines()
        groups = dict(_group_of(line) for line in (proc / "cgroup").read_text().splitlines())
    except (OSError, ValueError):  # not Linux
        return
    for line in mounts:
        before, _, after = line.partition(" - ")
        root, mount = (_unescaped(field) for field in before.split()[3:5])
        kind, _, options = after.split()[:3]
        group = groups.get(kind)
        if group is None or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        inside = Path(group).relative_to(root) if Path(group).is_relative_to(root) else Path()
        folder = Path(mount) / inside
        while folder.is_relative_to(mount):
            yield folder, _VERSIONS[kind]
            folder = folder.parent


def _group_of(line: str) -> tuple[str, str]:
    """File system and path of a line of /proc/self/cgroup; of version 1, the line of memory alone has the file system's name."""
    _, controllers, path = line.split(":", 2)
    if not controllers:
        return "cgroup2", path
    return ("cgroup" if "memory" in controllers.split(",") else controllers), path


def _unescaped(field: str) -> str:
    """Return a field of mountinfo unescaped: spaces and the like are written as octal numbers."""
    return field.encode().decode("unicode_escape")


def _left(folder: Path, files: _Files) -> int | None:
    try:
        limit, used = (int((folder / name).read_text()) for name in files)
        return max(0, limit - used + _file_pages(folder / "memory.stat"))
    except (OSError, ValueError):  # no such control group, or "max": no limit
        return None


def _file_pages(stat: Path) -> int:
    """Return the bytes of cached file pages, which count as used and are freed when memory runs short."""
    fields = dict(line.split() for line in stat.read_text().splitlines())
    names = ("inactive_file", "active_file")
    # Of version 1 those of the groups inside are counted apart.
    return sum(int(fields.get(f"total_{name}", fields.get(name, 0))) for name in names)
