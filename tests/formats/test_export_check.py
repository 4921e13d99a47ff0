"""The checksums of an export: any bit that flips in any of its files is found, and the same export mends it."""

import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hiddentap.capture.formats import ExportSettings, LayoutError, check_export, export_dataset
from hiddentap.models.errors import HiddentapError, UsageError
from support.export_layouts import LAYOUTS

OURS = ("hiddentap-export.json", "hiddentap-export.sha256", ".hiddentap-lock")


@pytest.fixture
def exported(dump: Path, tmp_path: Path) -> ExportSettings:
    settings = ExportSettings(dump, "modelopt", tmp_path / "d")
    export_dataset(settings)
    return settings


def what_is_said(dest: Path) -> str:
    """What the check finds or raises."""
    try:
        return "; ".join(f"{finding.path}: {finding.what}" for finding in check_export(dest).findings)
    except HiddentapError as error:
        return str(error)


def flip(path: Path, at: int = -1, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize(("to", "options"), LAYOUTS, ids=[to for to, _ in LAYOUTS])
def test_a_bit_flipped_in_any_file_is_found_by_its_name(
    dump: Path, tmp_path: Path, to: str, options: dict[str, Any]
) -> None:
    dest = tmp_path / "d"
    export_dataset(ExportSettings(dump, to, dest, **options))
    files = sorted(path for path in dest.rglob("*") if path.is_file() and path.name not in OURS)
    assert check_export(dest).ok
    assert check_export(dest).files == len(files)
    for path in files:
        flip(path, path.stat().st_size // 2)
        (found,) = check_export(dest).findings
        assert (found.path, found.severity) == (str(path), "error")
        assert "its bytes changed on disk: SHA-256" in found.what
        flip(path, path.stat().st_size // 2)


def test_sha256sum_checks_the_list_too(exported: ExportSettings) -> None:
    if shutil.which("sha256sum") is None:
        pytest.skip("no sha256sum here")
    command = ["sha256sum", "-c", "--quiet", "hiddentap-export.sha256"]
    assert subprocess.run(command, cwd=exported.dest, check=False).returncode == 0
    flip(next(exported.dest.glob("*.pt")))
    assert subprocess.run(command, cwd=exported.dest, check=False, capture_output=True).returncode == 1


def test_a_file_that_is_removed_is_made_again_by_the_same_export(exported: ExportSettings) -> None:
    path = next(exported.dest.glob("*.pt"))
    whole = hashlib.sha256(path.read_bytes()).hexdigest()
    path.unlink()
    assert [found.what.split(";")[0] for found in check_export(exported.dest).findings] == ["missing"]
    export_dataset(exported)
    assert check_export(exported.dest).ok
    assert hashlib.sha256(path.read_bytes()).hexdigest() == whole


def test_a_second_run_does_not_take_a_damaged_file_for_a_good_one(exported: ExportSettings) -> None:
    path = next(exported.dest.glob("*.pt"))
    flip(path)
    export_dataset(exported)
    assert [found.path for found in check_export(exported.dest).findings] == [str(path)]


@pytest.mark.parametrize("name", ["hiddentap-export.json", "hiddentap-export.sha256"])
def test_a_bit_flipped_in_the_records_of_an_export_is_found(name: str, exported: ExportSettings) -> None:
    path = exported.dest / name
    for at in range(0, path.stat().st_size, 7):
        flip(path, at, at % 8)
        assert name in what_is_said(exported.dest), at
        flip(path, at, at % 8)
    assert check_export(exported.dest).ok


def test_files_of_others_and_unfinished_exports_are_said(exported: ExportSettings) -> None:
    (exported.dest / "mine.txt").write_text("x")
    (found,) = check_export(exported.dest).findings
    assert (found.severity, found.what) == ("warning", "no file of this export")
    record = json.loads((exported.dest / "hiddentap-export.json").read_text())
    old = {key: record[key] for key in ("export_version", "identity", "complete")}
    (exported.dest / "hiddentap-export.json").write_text(json.dumps(old))
    with pytest.raises(UsageError, match=r"an earlier release wrote it\. Run the same export again"):
        check_export(exported.dest)
    (exported.dest / "hiddentap-export.json").write_text(json.dumps(old | {"complete": False}))
    assert [found.what for found in check_export(exported.dest).findings] == [
        "the export is not complete; run it again to finish it"
    ]
    (exported.dest / "hiddentap-export.json").write_text("[]")
    with pytest.raises(LayoutError, match=r"hiddentap-export\.json cannot be read"):
        check_export(exported.dest)


def test_an_export_of_an_earlier_release_gets_its_checksums_by_running_it_again(exported: ExportSettings) -> None:
    (exported.dest / "hiddentap-export.sha256").unlink()
    record = json.loads((exported.dest / "hiddentap-export.json").read_text())
    for name in ("crc32", "sums_sha256"):
        del record[name]
    (exported.dest / "hiddentap-export.json").write_text(json.dumps(record))
    export_dataset(exported)
    assert check_export(exported.dest).ok
