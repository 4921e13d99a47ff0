import shutil
import subprocess
from pathlib import Path

import pytest

from support.source_copy import ROOT

BASH = shutil.which("bash") or "bash"


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder to be the whole PATH: the few tools that the script calls, and no Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("dirname", "mktemp", "cat", "rm", "cksum"):
        (folder / name).symlink_to(shutil.which(name) or name)
    return folder


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "x-y"
    for made in ("scripts", "constraints"):
        (folder / made).mkdir(parents=True)
    for name in ("scripts/setup.sh", "pyproject.toml", "constraints/highest.txt"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def set_up(repository: Path, tools: Path) -> subprocess.CompletedProcess[str]:
    command = [BASH, repository / "scripts" / "setup.sh", "test"]
    return subprocess.run(command, cwd="/", env={"PATH": str(tools)}, capture_output=True, text=True)


def fake_python(path: Path, body: str) -> None:
    path.write_text(f"#!{BASH}\n{body}\n", encoding="utf-8")
    path.chmod(0o755)


def test_without_any_python_the_message_says_what_was_tried(repository: Path, tools: Path) -> None:
    done = set_up(repository, tools)
    assert done.returncode == 1
    assert done.stderr == (
        "setup: Python 3.11 or newer with its venv module is needed; "
        "tried python3.13, python3.12, python3.11 and python3.\n"
    )


def test_a_python_that_does_not_run_is_passed_over_for_the_next(repository: Path, tools: Path) -> None:
    fake_python(tools / "python3.13", 'echo "command not found" >&2; exit 127')
    fake_python(tools / "python3.12", '[[ $1 == -c ]] && exit 0; echo "3.12 was asked: $*"; exit 1')
    done = set_up(repository, tools)
    assert done.returncode == 1
    said, asked, *_ = done.stderr.splitlines()
    assert said == "setup: making .venv with python3.12"
    assert asked == f"3.12 was asked: -m venv --clear {repository}/.venv"


def test_a_finished_set_up_says_nothing_and_installs_nothing_again(repository: Path, tools: Path) -> None:
    calls = repository / "calls"
    python = repository / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    fake_python(python, f'echo "$*" >>"{calls}"')
    first = set_up(repository, tools)
    assert (first.returncode, first.stdout) == (0, "")
    assert first.stderr == "setup: installing hiddentap[test] into .venv\n"
    installs = [line for line in calls.read_text(encoding="utf-8").splitlines() if "pip install" in line]
    assert len(installs) == 2
    assert installs[1].endswith(f"--editable {repository}[test]")

    calls.unlink()
    done = set_up(repository, tools)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "pip" not in calls.read_text(encoding="utf-8")


def test_changed_requirements_are_installed(repository: Path, tools: Path) -> None:
    calls = repository / "calls"
    python = repository / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    fake_python(python, f'echo "$*" >>"{calls}"')
    set_up(repository, tools)
    calls.unlink()
    with (repository / "constraints/highest.txt").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    set_up(repository, tools)
    assert "pip install" in calls.read_text(encoding="utf-8")


@pytest.mark.parametrize(("found", "constrained"), [(0, False), (1, True)], ids=["new enough", "missing"])
def test_the_constraint_applies_only_where_no_fitting_torch_is_installed(
    repository: Path, tools: Path, found: int, constrained: bool
) -> None:
    calls = repository / "calls"
    python = repository / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    # `python -` is the script's question about torch.
    fake_python(python, f'[[ $1 == - ]] && exit {found}; echo "$*" >>"{calls}"')
    assert set_up(repository, tools).returncode == 0
    assert (f"--constraint {repository}/constraints/highest.txt" in calls.read_text(encoding="utf-8")) == constrained
