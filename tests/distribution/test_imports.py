import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import hiddentap
from support.source_copy import ROOT, copy_source

LINT = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(config_filename=sys.argv[1], no_cache=True))"


def lint(package_parent: Path, config: Path) -> subprocess.CompletedProcess[str]:
    """The import linter on the `hiddentap` that lies in `package_parent`."""
    # A wide terminal: the linter breaks its lines at the width, and tests read them.
    environment = {**os.environ, "PYTHONPATH": str(package_parent), "COLUMNS": "200"}
    command = [sys.executable, "-c", LINT, str(config)]
    return subprocess.run(command, cwd=package_parent, env=environment, capture_output=True, text=True)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return copy_source(tmp_path / "hiddentap")


def test_imports_go_one_way(copied: Path) -> None:
    done = lint(copied.parent, copied / "pyproject.toml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("models/wrong.py", "from ..hooks import taps"),
        ("hooks/wrong.py", "from ..capture import mixin"),
        ("capture/store/wrong.py", "from .. import outputs"),
        ("capture/outputs/wrong.py", "from ..run import plan"),
    ],
)
def test_an_import_the_other_way_is_found(copied: Path, module: str, line: str) -> None:
    (copied / module).write_text(line + "\n", encoding="utf-8")
    done = lint(copied.parent, copied / "pyproject.toml")
    assert done.returncode == 1
    assert "wrong" in done.stdout


def test_one_copy_of_the_package_is_loaded() -> None:
    folders = [ROOT / name for name in ("capture", "hooks", "models")]
    files = {name: Path(module.__file__) for name, module in sys.modules.items() if getattr(module, "__file__", None)}
    ours = {
        name: path
        for name, path in files.items()
        if path.parent == ROOT or any(path.is_relative_to(folder) for folder in folders)
    }
    assert Path(hiddentap.__file__) == ROOT / "__init__.py"
    assert [name for name in ours if name.split(".")[0] != "hiddentap" and name != "__main__"] == []
    assert [path for path, times in Counter(ours.values()).items() if times > 1] == []


def imported_by(code: str) -> set[str]:
    """The modules that `code` imports in an interpreter of its own, those of its start left out."""
    script = f"import sys; before = {{*sys.modules}}; {code}; print(*{{*sys.modules}} - before)"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return set(done.stdout.splitlines()[-1].split())


def packages_of(modules: set[str]) -> set[str]:
    """The installed packages among modules."""
    return {module.partition(".")[0] for module in modules} - sys.stdlib_module_names


def test_importing_the_package_imports_nothing_but_the_list_of_its_names() -> None:
    modules = imported_by("import hiddentap")
    assert packages_of(modules) == {"hiddentap"}
    assert {module for module in modules if module.startswith("hiddentap.")} == {
        "hiddentap.models",
        "hiddentap.models.public_names",
    }
    assert len(modules) <= 20, sorted(modules)


def test_the_commands_help_imports_no_package_but_click() -> None:
    modules = imported_by(
        "from hiddentap.capture.cli.main import hiddentap; hiddentap.main(['--help'], standalone_mode=False)"
    )
    assert packages_of(modules) == {"hiddentap", "click"}
    assert len(modules) <= 100, sorted(modules)
