"""One capture of forty short samples in several shards, shared by the tests of this folder."""

from pathlib import Path

import pytest

from hiddentap import CapturedDataset
from support.captured import captured
from support.model_folder import llama_folder, write_rows

LENGTHS = [3 + (i * 7) % 19 for i in range(40)]


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(tmp_path_factory.mktemp("reading") / "model")


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sample i is 10 + i, over and over."""
    lines = [{"id": f"s{i}", "input_ids": [10 + i] * length} for i, length in enumerate(LENGTHS)]
    return write_rows(tmp_path_factory.mktemp("reading") / "rows.jsonl", lines)


@pytest.fixture(scope="session")
def out(tmp_path_factory: pytest.TempPathFactory, target: Path, rows: Path) -> Path:
    folder = tmp_path_factory.mktemp("reading") / "out"
    return captured(target, folder, data=rows, layer_ids=(0, 2), final="pre", head=True, shard_rows=90, exact=True)


@pytest.fixture
def dataset(out: Path) -> CapturedDataset:
    return CapturedDataset(out)
