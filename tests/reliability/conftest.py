"""A tiny model, and a server that runs the command on it."""

from collections.abc import Iterator

import pytest

from support.fork_server import ForkServer


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    with ForkServer(tmp_path_factory.mktemp("runs")) as server:
        yield server
