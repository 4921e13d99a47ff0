"""The scripts' own folder is on the path, as it is when one of them runs; a tiny target and its capture are shared."""

import sys
from pathlib import Path

import pytest

from support.captured import captured
from support.model_folder import llama_folder, write_rows

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(tmp_path_factory.mktemp("scripts") / "model", num_hidden_layers=6)


@pytest.fixture(scope="session")
def out(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    """Sixty texts that count up and around through ten ids."""
    folder = tmp_path_factory.mktemp("scripts") / "out"
    rows = [{"id": f"s{i}", "input_ids": [8 + (i + t) % 10 for t in range(20)]} for i in range(60)]
    data = write_rows(folder.with_suffix(".jsonl"), rows)
    return captured(
        target, folder, data=data, layer_ids=(0, 2, 4), final="pre", head=True, top_logits=8, shard_rows=400
    )
