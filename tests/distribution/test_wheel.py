import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from support.source_copy import ROOT, copy_source

PACKAGE_FOLDERS = ("capture", "hooks", "models")


def pip(*arguments: str | Path) -> None:
    """pip of this environment, without network; its output is shown where it fails."""
    command = [sys.executable, "-m", "pip", *map(str, arguments), "--no-deps", "--no-index", "--no-build-isolation"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Built from a copy: a build folder left in the repository would bring files into the wheel that are long deleted.
    source = copy_source(tmp_path_factory.mktemp("source") / "x-y")
    built = tmp_path_factory.mktemp("wheel")
    pip("wheel", source, "--wheel-dir", built)
    [path] = built.iterdir()
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    pip("install", wheel, "--target", target)
    return target


def run_installed(installed: Path, cwd: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, env={"PYTHONPATH": str(installed)}, capture_output=True, text=True)


def test_the_wheel_holds_the_package_and_its_metadata_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert tops == {"hiddentap", "hiddentap-0.1.0.dist-info"}


def test_every_module_of_the_repository_is_in_the_wheel_and_nothing_else_is(wheel: Path) -> None:
    expected = {f"hiddentap/{path.name}" for path in ROOT.glob("*.py")} | {"hiddentap/py.typed"}
    for folder in PACKAGE_FOLDERS:
        expected |= {f"hiddentap/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / folder).rglob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if name.startswith("hiddentap/")}
    assert found == expected


def test_the_licence_travels_with_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        licence = archive.read("hiddentap-0.1.0.dist-info/licenses/LICENSE")
        metadata = archive.read("hiddentap-0.1.0.dist-info/METADATA").decode()
    assert licence == (ROOT / "LICENSE").read_bytes()
    assert "License-Expression: Apache-2.0" in metadata


def test_an_installed_copy_is_the_one_imported_and_claims_no_other_top_level_name(
    installed: Path, tmp_path: Path
) -> None:
    code = (
        "import hiddentap, importlib.util as u; print(hiddentap.__file__);"
        "print([n for n in ('capture', 'hooks', 'models', 'tests', 'scripts') if u.find_spec(n)])"
    )
    done = run_installed(installed, tmp_path, sys.executable, "-c", code)
    assert done.stdout.splitlines() == [str(installed / "hiddentap" / "__init__.py"), "[]"], done.stderr


@pytest.mark.parametrize("way", ["command", "module"])
def test_an_installed_copy_shows_its_help(installed: Path, tmp_path: Path, way: str) -> None:
    command = [installed / "bin" / "hiddentap"] if way == "command" else [sys.executable, "-m", "hiddentap"]
    done = run_installed(installed, tmp_path, *command, "--help")
    assert done.returncode == 0, done.stderr
    assert "capture" in done.stdout
