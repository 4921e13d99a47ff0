"""Model folders, made once."""

from pathlib import Path

import pytest

from support import vision


@pytest.fixture(scope="session")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma3")
    vision.gemma3(folder)
    return folder


@pytest.fixture(scope="session")
def qwen3_vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_vl")
    vision.qwen3_vl(folder)
    return folder


@pytest.fixture(scope="session")
def kimi_k25(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kimi_k25")
    vision.kimi_k25(folder)
    return folder


@pytest.fixture(scope="session")
def own_kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own_kimi")
    vision.own_kimi(folder)
    return folder


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """24 x 16 pixels are 6 features of 8 x 8, 16 x 32 are 8."""
    vision.picture(tmp_path / "pictures", "wide.png", 24, 16, seed=1)
    vision.picture(tmp_path / "pictures", "tall.png", 16, 32, seed=2)
    return tmp_path / "pictures"
