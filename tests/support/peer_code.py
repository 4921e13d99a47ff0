"""Trainers' own classes where their packages cannot be imported whole."""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SOURCES = "HIDDENTAP_PEER_SOURCES"


def checkout(name: str, needed: str) -> Path:
    """The folder `name` below $HIDDENTAP_PEER_SOURCES, in which the file `needed` is; skips the test where it is not."""
    parent = os.environ.get(SOURCES)
    if parent is None or not (Path(parent) / name / needed).is_file():
        pytest.skip(f"no {name}/{needed} below ${SOURCES}")
    return Path(parent) / name


def installed(package: str) -> Path:
    """The folder of an installed package, which is not imported; skips the test where it is not installed."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    return Path(spec.origin).parent


@contextmanager
def bare_packages(folder: Path, *inner: str) -> Iterator[ModuleType]:
    """`folder` and the packages `inner` below it, as packages whose __init__ has not run; gone again at the end."""
    name = folder.name
    for path in ("", *inner):
        module = ModuleType(f"{name}.{path}" if path else name)
        module.__path__ = [str(folder.joinpath(*path.split(".")) if path else folder)]
        sys.modules[module.__name__] = module
    try:
        yield sys.modules[name]
    finally:
        for loaded in [key for key in sys.modules if key == name or key.startswith(name + ".")]:
            del sys.modules[loaded]


def angelslim_module(path: str) -> Any:
    """A module of AngelSlim; inside `bare_packages`. Its `angelslim.utils` is the real one as far as the data need it."""
    utils = sys.modules["angelslim.utils"]
    utils.rank0_print = importlib.import_module("angelslim.utils.utils").rank0_print
    return importlib.import_module(path)


def definitions(script: Path, names: set[str], around: Mapping[str, Any]) -> dict[str, Any]:
    """The functions and classes `names` of a script that cannot be imported, run with `around` as their module's names."""
    tree = ast.parse(script.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.ClassDef)
    tree.body = [node for node in tree.body if isinstance(node, kinds) and node.name in names]
    held = dict(around)
    exec(compile(tree, str(script), "exec"), held)
    return {name: held[name] for name in names}
