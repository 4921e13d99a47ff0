"""What the system refuses: the error names the file, what was tried and what to do, and calls nothing damaged for it."""

import errno
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hiddentap.capture.store import (
    CapturedDataset,
    DiskFullError,
    FileAccessError,
    FolderLock,
    Manifest,
    NewerFormatError,
    OutputFolder,
    Plan,
    PlanError,
    Shard,
    ShardError,
)
from hiddentap.models.errors import RunError, UsageError
from support.damage import change_header
from support.shards import write_plan, write_shard

NAME = "shard-000000.safetensors"
NUMBER_ALONE = re.compile(r"'\d+'|\b(fd|descriptor) \d+")


def failing(monkeypatch: pytest.MonkeyPatch, call: str, number: int, at: int = 1) -> None:
    """os.`call` raises that errno from its `at`-th use on."""
    real, left = getattr(os, call), [at]

    def refuse(*args: Any, **more: Any) -> Any:
        left[0] -= 1
        if left[0] <= 0:
            raise OSError(number, os.strerror(number), args[0] if isinstance(args[0], int) else None)
        return real(*args, **more)

    monkeypatch.setattr(os, call, refuse)


def writing(folder: Path) -> None:
    write_shard(folder / NAME, 3, 5)


def reading(folder: Path) -> None:
    Shard(folder / "sealed.safetensors").sample(0)


def listing(folder: Path) -> None:
    CapturedDataset(folder / "sealed.safetensors")[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_shard(tmp_path / "sealed.safetensors", 3, 5)
    return tmp_path


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES, errno.ENOMEM])
@pytest.mark.parametrize(
    ("work", "call"),
    [
        *[(writing, call) for call in ("open", "pwrite", "fsync", "posix_fallocate")],
        *[(work, call) for work in (reading, listing) for call in ("open", "fstat", "preadv")],
    ],
)
def test_a_call_that_the_system_refuses_is_told_with_the_files_name_and_never_with_a_number(
    work: Callable[[Path], None], call: str, number: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        failing(patched, call, number)
        with pytest.raises(RunError) as caught:
            work(folder)
    text = str(caught.value)
    assert not isinstance(caught.value, ShardError)
    assert str(folder) in text
    assert re.search(r"cannot be (opened|read|written|created|locked)", text)
    assert os.strerror(number) in text
    assert not NUMBER_ALONE.search(text)
    assert "damage" not in text
    work(folder)  # and nothing is left that keeps it from working


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSPC, errno.ESTALE, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("at", [1, 4])
def test_a_plan_that_cannot_be_opened_now_is_not_called_damaged(
    number: int, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plan(tmp_path / "plan", 3, 4)
    with monkeypatch.context() as patched:
        failing(patched, "open", number, at)
        with pytest.raises(
            (FileAccessError, DiskFullError), match=rf"plan.*{re.escape(os.strerror(number))}"
        ) as caught:
            Plan(tmp_path / "plan")
    assert not isinstance(caught.value, PlanError)
    assert "emove" not in str(caught.value)
    Plan(tmp_path / "plan").require_whole()


def test_too_many_open_files_point_to_the_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "open", errno.EMFILE)
    with pytest.raises(FileAccessError, match=r"sealed.safetensors: cannot be opened .*ulimit -n"):
        reading(folder)


def test_a_manifest_that_cannot_be_read_now_is_not_called_another_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Manifest.from_shards({}, {}, [], complete=True).write(tmp_path / "manifest.json")

    def refuse(_: Path) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(FileAccessError, match=r"manifest.json: cannot be read .Input/output error"):
        Manifest.read(tmp_path / "manifest.json")


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "folder"])
def test_a_lock_that_is_no_file_of_ours_is_refused_and_nothing_is_written_through_it(kind: str, tmp_path: Path) -> None:
    target, lock = tmp_path / "thesis.txt", tmp_path / "lock"
    if kind == "pipe":
        os.mkfifo(lock)
    elif kind == "folder":
        lock.mkdir()
    else:
        lock.symlink_to(target)
    if kind == "link":
        target.write_text("years of work")
    with pytest.raises((UsageError, FileAccessError), match=re.escape(str(lock))), FolderLock(lock):
        pass
    assert target.exists() == (kind == "link")
    assert kind != "link" or target.read_text() == "years of work"


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder"])
def test_what_has_a_shards_name_and_is_no_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    path = tmp_path / NAME
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as server, pytest.MonkeyPatch.context() as patched:
            patched.chdir(tmp_path)
            server.bind(NAME)
    with pytest.raises(ShardError, match=rf"{NAME}: is no regular file"):
        Shard(path)


def test_one_reading_that_comes_short_condemns_no_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = OutputFolder(tmp_path)
    folder.shards.mkdir()
    write_shard(folder.shard_path(0), 3)
    real, left = os.preadv, [1]

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        if left[0]:
            left[0] -= 1
            return 0
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", short)
    found = folder.sealed_shards()
    assert (sorted(found.shards), found.broken) == ([0], {})


def test_a_read_that_gives_less_than_asked_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shard(tmp_path / NAME, 3, 5)
    expected = Shard(tmp_path / NAME).sample(1)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:7]], offset))
    found = Shard(tmp_path / NAME).sample(1)
    assert all(found[name].equal(expected[name]) for name in expected)


def test_a_shard_of_a_later_release_is_refused_with_one_text_and_not_taken_for_broken(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path)
    folder.shards.mkdir()
    write_shard(folder.shard_path(0), 3)

    def later(record: dict[str, Any]) -> None:
        record["format_version"] = 2

    change_header(folder.shard_path(0), later)
    for read in (folder.sealed_shards, lambda: Shard(folder.shard_path(0))):
        with pytest.raises(NewerFormatError, match=rf"{NAME}: format version 2, this release reads 1"):
            read()


def test_a_later_release_that_guards_its_header_otherwise_is_refused_too(tmp_path: Path) -> None:
    write_shard(tmp_path / NAME, 3)

    def later(record: dict[str, Any]) -> None:
        record["format_version"] = 7
        del record["header_crc32"]

    change_header(tmp_path / NAME, later)
    with pytest.raises(NewerFormatError, match="format version 7"):
        Shard(tmp_path / NAME)
