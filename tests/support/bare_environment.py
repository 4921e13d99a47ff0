"""Environments that hold chosen packages of this one and no others, made of links and without a network."""

import os
import subprocess
import sys
import sysconfig
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

# What a distribution writes outside of its package folders: scripts, and caches beside them.
_SHARED = {"__pycache__", ".."}


def closure(*names: str) -> dict[str, Distribution]:
    """The installed distributions that `names` need, themselves included, by the requirements they state."""
    found: dict[str, Distribution] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            # CUDA's packages of another build of torch, say: not here, so not needed here.
            continue
        requirements = [Requirement(text) for text in found[name].requires or ()]
        waiting += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


def link_packages(folder: Path, *names: str) -> None:
    """Link what `names` need into `folder`, as site-packages has it."""
    for found in closure(*names).values():
        root = Path(str(found.locate_file("")))
        for top in {file.parts[0] for file in found.files or ()} - _SHARED:
            link = folder / top
            if not link.exists():
                link.symlink_to(root / top)


def make_environment(folder: Path, *names: str) -> Path:
    """A virtual environment with pip, with what `names` need and with nothing else; its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    link_packages(site, *names)
    return folder / ("Scripts" if os.name == "nt" else "bin") / "python"
