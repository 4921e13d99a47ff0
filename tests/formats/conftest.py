"""The captures that these tests export: one in bfloat16 and one in float32, pre-norm and head stored."""

from pathlib import Path

import pytest
import torch

from support.trainer_dump import Expected, capture, make_target, plain_forward, write_data

EAGLE3_IDS = (1, 3, 4)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "rows.jsonl")


@pytest.fixture(scope="session")
def expected(target: Path) -> list[Expected]:
    """In bfloat16."""
    return plain_forward(target, torch.bfloat16)


@pytest.fixture(scope="session")
def expected32(target: Path) -> list[Expected]:
    return plain_forward(target, torch.float32)


@pytest.fixture(scope="session")
def dump(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers 1, 3, 4 (boundaries 2, 4, 5) and pre-norm, in bfloat16."""
    return capture(target, data, tmp_path_factory.mktemp("dump") / "out", EAGLE3_IDS)


@pytest.fixture(scope="session")
def dump32(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return capture(target, data, tmp_path_factory.mktemp("dump32") / "out", EAGLE3_IDS, dtype="float32")


@pytest.fixture
def captured(target: Path, data: Path, tmp_path: Path):
    """Make another capture: `captured("name", (1, 2), final="post", head=False)`."""
    return lambda name, layer_ids, **more: capture(target, data, tmp_path / name, layer_ids, **more)
