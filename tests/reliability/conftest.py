"""A tiny model, and a server that runs the command on it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.fork_server import ForkServer
from support.model_folder import llama_folder


@pytest.fixture(scope="package")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    with ForkServer(tmp_path_factory.mktemp("runs")) as server:
        yield server
