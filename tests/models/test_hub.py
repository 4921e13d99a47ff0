"""Names that can lead to no model are told at once, before the hub's client tries and tries."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from hiddentap.capture.data import RecordEncoder, TokeniseOptions
from hiddentap.models import hub
from hiddentap.models.errors import UsageError
from hiddentap.models.hub import unreachable
from hiddentap.models.loading import ModelLoadError, ModelSource, load_config


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[tuple[str, int]]]:
    """A machine whose cache is empty and whose network is down; the places that were dialled."""
    places: list[tuple[str, int]] = []

    def no_route(place: tuple[str, int], timeout: float) -> None:
        places.append(place)
        raise OSError("no route to host")

    monkeypatch.setattr(hub.socket, "create_connection", no_route)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.example")
    monkeypatch.setattr(hub, "getproxies", dict)
    return places


def test_a_folder_may_be_loaded(tmp_path: Path, tried: list) -> None:
    assert unreachable(str(tmp_path)) is None
    assert tried == []


@pytest.mark.parametrize("name", ["/no/such/folder", "./model", "../model", "models/small/llama", "~/model", "model/"])
def test_a_mistyped_path_is_told_without_a_look_at_the_network(name: str, tried: list) -> None:
    assert unreachable(name) == (
        f"expected a folder or a hub id; there is no folder {name}, and a hub id looks like name or org/name"
    )
    assert tried == []


def test_a_file_is_told(tmp_path: Path, tried: list) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "model.safetensors is a file" in (unreachable(str(tmp_path / "model.safetensors")) or "")


@pytest.mark.parametrize("name", ["models/llama", "llama.d"])
def test_a_name_that_could_be_a_hub_id_is_told_where_no_hub_answers(name: str, tried: list) -> None:
    start = time.monotonic()
    with pytest.raises(ModelLoadError) as caught:
        load_config(ModelSource(name))
    assert time.monotonic() - start < 60
    assert str(caught.value) == (
        f"{name} cannot be loaded as a model: expected a folder or a hub id; there is no folder {name}, no such model in the "
        "hub's cache here, and the hub (hub.example) cannot be reached: no route to host."
    )
    assert tried == [("hub.example", 443)]


def test_a_tokenizer_is_told_alike(tried: list) -> None:
    with pytest.raises(
        UsageError, match=r"expected a tokenizer at models/llama; .* the hub \(hub.example\) cannot be reached"
    ):
        _ = RecordEncoder(TokeniseOptions(tokenizer="models/llama")).tokenizer  # loaded when it is first needed


def test_a_cached_model_an_offline_client_and_a_proxy_are_left_to_the_client(
    tried: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache/models--org--cached").mkdir(parents=True)
    assert unreachable("org/cached") is None
    monkeypatch.setattr(hub, "getproxies", lambda: {"https": "http://proxy"})
    assert unreachable("org/other") is None
    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert unreachable("org/other") is None
    assert tried == []
