"""A copy of the repository's own files, for tests that build, install or break it."""

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_LEFT_OUT = (".*", "__pycache__", "*.egg-info", "build", "dist", "demo-out")


def copy_source(to: Path) -> Path:
    """Copies the repository, without its history, environment and build outputs, to the new folder `to`."""
    return Path(shutil.copytree(ROOT, to, ignore=shutil.ignore_patterns(*_LEFT_OUT)))
