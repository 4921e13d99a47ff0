"""The memory that is left within control groups, however they are nested and mounted."""

from pathlib import Path

import pytest
import torch

from hiddentap.models import memory

GB = 10**9
V1_UNLIMITED = 9223372036854771712


class Machine:
    """Files as Linux shows them, in a folder of their own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        (folder / "proc").mkdir()
        monkeypatch.setattr(memory, "_PROC", folder / "proc")
        monkeypatch.setattr(memory, "_free_of_the_machine", lambda: 100 * GB)

    def mounted(self, *lines: str) -> None:
        (self.folder / "proc/mountinfo").write_text("\n".join(lines))

    def member_of(self, *lines: str) -> None:
        (self.folder / "proc/cgroup").write_text("\n".join(lines))

    def group(self, path: str, limit: object, used: int, *, version: int = 2, **stat: int) -> None:
        place = self.folder / path
        place.mkdir(parents=True, exist_ok=True)
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        for name, value in zip(names, (limit, used), strict=True):
            (place / name).write_text(f"{value}\n")
        (place / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in stat.items()))

    @property
    def left(self) -> int:
        return memory.available_bytes(torch.device("cpu"))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def mount2(machine: Machine, root: str = "/", at: str = "cg") -> str:
    return f"30 23 0:26 {root} {machine.folder / at} rw,nosuid shared:9 - cgroup2 cgroup2 rw"


def mount1(machine: Machine, controllers: str = "memory", root: str = "/") -> str:
    return f"31 23 0:27 {root} {machine.folder / 'cg1'} rw shared:10 - cgroup cgroup rw,{controllers}"


def test_the_limit_of_a_nested_group_counts_and_so_does_that_of_each_group_around_it(machine: Machine) -> None:
    machine.mounted("22 1 0:5 / /dev rw - devtmpfs dev rw", mount2(machine))
    machine.member_of("0::/user.slice/run.scope")
    machine.group("cg/user.slice", "max", 9 * GB)
    machine.group("cg/user.slice/run.scope", 3 * GB, GB, inactive_file=5, active_file=7, anon=GB)
    assert machine.left == 2 * GB + 12
    machine.group("cg/user.slice", 10 * GB, 9 * GB)
    assert machine.left == GB
    machine.group("cg", 4 * GB, 5 * GB)
    assert machine.left == 0


def test_version_1_counts_the_file_pages_of_the_groups_inside(machine: Machine) -> None:
    machine.mounted(mount1(machine, "cpu,cpuacct").replace("cg1", "cpu"), mount1(machine))
    machine.member_of("4:memory:/jobs/7", "2:cpu,cpuacct:/jobs", "0::/")
    machine.group("cg1", V1_UNLIMITED, 50 * GB, version=1)
    machine.group("cg1/jobs", 8 * GB, 7 * GB, version=1, inactive_file=1, total_inactive_file=6, total_active_file=4)
    machine.group("cg1/jobs/7", V1_UNLIMITED, GB, version=1)
    assert machine.left == GB + 10


def test_a_container_sees_its_group_at_the_mount(machine: Machine) -> None:
    machine.mounted(mount2(machine, root="/docker/abc"))
    machine.member_of("0::/docker/abc/inner")
    machine.group("cg", 6 * GB, 0)
    machine.group("cg/inner", 5 * GB, 0)
    assert machine.left == 5 * GB
    machine.member_of("0::/../elsewhere")
    assert machine.left == 6 * GB


def test_a_mount_with_a_space_in_its_name_is_found(machine: Machine) -> None:
    machine.mounted(mount2(machine, at="a b").replace("a b", r"a\040b"))
    machine.member_of("0::/")
    machine.group("a b", GB, 0)
    assert machine.left == GB


def test_without_control_groups_the_machine_is_the_limit(machine: Machine) -> None:
    assert machine.left == 100 * GB
    machine.mounted(mount2(machine))
    machine.member_of("0::/gone")
    assert machine.left == 100 * GB
