import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from support.source_copy import copy_source


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy in a folder whose name is no identifier, with an environment of its own that has the copy installed, editable."""
    folder = copy_source(tmp_path / "x-y")
    environment = folder / ".venv"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    # This environment's packages by path: its own editable install of the project is no path and stays behind.
    library = sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)})
    Path(library, "shared.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--editable", folder]
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        environment / "bin" / "python",
        "install",
        "--force-reinstall",
        *options,
    )
    return folder


def run(*command: str | Path, cwd: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    done = subprocess.run(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("start", ["root", "elsewhere"])
def test_the_suite_is_collected_in_a_folder_named_x_y_with_one_copy_of_the_package(
    clone: Path, tmp_path: Path, start: str
) -> None:
    # Everything is collected, hence imported, before the one test that looks at sys.modules runs.
    tests, cwd = ("tests/", clone) if start == "root" else (str(clone / "tests"), tmp_path)
    chosen = ["-k", "test_one_copy_of_the_package_is_loaded", "-p", "no:cacheprovider"]
    shown = run(clone / ".venv" / "bin" / "python", "-m", "pytest", tests, "-q", *chosen, cwd=cwd)
    assert "1 passed" in shown
