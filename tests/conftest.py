"""Settings for every test: no hub, one thread, and the SmolLM2 folder where it has been made."""

import os

# Before any import of torch or transformers, and in the environment, so that the commands which tests start obey too.
# One thread: float32 bits change with the number of threads, and tests compare bits across processes.
os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

import shutil
from pathlib import Path

import pytest
import torch

from support.model_folder import CHATS, llama_folder, write_rows
from support.smollm2 import smollm2_path

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The SmolLM2-135M-Instruct folder; skips where nobody has made it. Never downloads."""
    folder = smollm2_path()
    if not (folder / "config.json").is_file():
        pytest.skip(f"{folder} is not there: make it with `python scripts/smollm2.py`")
    return folder


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama with a byte tokenizer; tests do not change it."""
    return llama_folder(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def out(good: Path, tmp_path: Path) -> Path:
    """A copy, to damage, of the folder that the module's own fixture `good` captured."""
    return Path(shutil.copytree(good, tmp_path / "out"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Five short conversations with the ids a to e."""
    return write_rows(tmp_path / "chats.jsonl", CHATS)
