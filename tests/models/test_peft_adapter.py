"""An adapter that lies beside the base weights is applied and named, or refused; never left out in silence."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from hiddentap import CapturedDataset, CaptureSettings, capture_dataset, verify
from hiddentap.capture.cli.inspect import inspect
from hiddentap.models import peft_adapter
from hiddentap.models.errors import UsageError
from hiddentap.models.loading import ModelLoadError, ModelSource, describe_model, load_layer_by_layer, load_model
from hiddentap.models.peft_adapter import PeftAdapterError
from support import tiny
from support.model_folder import CHATS, llama_folder, write_rows

RANK = 2
with_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="peft is not installed; see tests/requirements-peers.txt"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama with a LoRA of layer 1's q_proj beside it."""
    from safetensors.torch import save_file

    folder = llama_folder(tmp_path / "model")
    config = {
        "peft_type": "LORA", "r": RANK, "lora_alpha": 4, "target_modules": ["q_proj"], "layers_to_transform": [1],
        "task_type": "CAUSAL_LM", "base_model_name_or_path": None, "inference_mode": True,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    prefix = "base_model.model.model.layers.1.self_attn.q_proj"
    generator = torch.Generator().manual_seed(0)
    matrices = {
        f"{prefix}.lora_A.weight": torch.randn(RANK, 32, generator=generator),
        f"{prefix}.lora_B.weight": torch.randn(32, RANK, generator=generator),
    }
    save_file(matrices, folder / "adapter_model.safetensors")
    return folder


def source(folder: Path) -> ModelSource:
    return ModelSource(str(folder), device="cpu")


def test_without_peft_it_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peft_adapter, "find_spec", lambda _: None)
    with pytest.raises(PeftAdapterError, match=r"holds an adapter .*needs the package peft: pip install peft"):
        load_model(source(folder))


def test_with_streamed_weights_it_is_refused_with_the_way_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peft_adapter, "find_spec", lambda _: "found")
    with pytest.raises(ModelLoadError, match=r"has an adapter, which cannot be streamed; merge it into"):
        load_layer_by_layer(source(folder))


@with_peft
def test_with_peft_it_is_applied_said_and_part_of_the_identity(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    loaded = load_model(source(folder))
    base = load_model(source(llama_folder(tmp_path / "base"))).model
    a, b = load_file(folder / "adapter_model.safetensors").values()
    base.model.layers[1].self_attn.q_proj.weight += 4 / RANK * (b @ a)
    ids = tiny.token_ids(1, 9)
    with torch.no_grad():
        found, expected = (m(ids).logits for m in (loaded.model, base))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert "the adapter of adapter_config.json is applied (default)" in loaded.notes
    (key,) = loaded.published
    assert key == "peft_adapter_sha256"
    edited = json.loads((folder / "adapter_config.json").read_text()) | {"lora_alpha": 8}
    (folder / "adapter_config.json").write_text(json.dumps(edited))
    assert load_model(source(folder)).published != loaded.published


def test_an_adapter_that_loading_leaves_out_is_refused(folder: Path) -> None:
    adapter = peft_adapter.PeftAdapter.of(None, str(folder), None)
    assert adapter is not None
    nothing = SimpleNamespace(missing_keys=set(), unexpected_keys=set())
    base = SimpleNamespace(load_adapter=lambda *_, **__: nothing)
    with pytest.raises(PeftAdapterError, match="loading did not apply it"):
        adapter.apply(base, "M")


@pytest.fixture
def adapter(folder: Path, tmp_path: Path) -> Path:
    """The same adapter in a folder of its own, and none left beside the weights."""
    apart = tmp_path / "adapter"
    apart.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).rename(apart / name)
    return apart


def logits(source: ModelSource) -> torch.Tensor:
    with torch.no_grad():
        return load_model(source).model(tiny.token_ids(1, 9)).logits


@with_peft
def test_an_adapter_from_elsewhere_is_the_one_beside_the_weights(folder: Path, tmp_path: Path) -> None:
    beside, identity = logits(source(folder)), load_model(source(folder)).published
    apart = tmp_path / "apart"
    apart.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).rename(apart / name)
    given = ModelSource(str(folder), device="cpu", peft=str(apart))
    assert torch.equal(logits(given), beside)
    assert not torch.equal(logits(source(folder)), beside)
    assert load_model(given).published == {**identity, "peft_adapter": str(apart.resolve())}
    assert f"the adapter of {apart} is applied (default)" in load_model(given).notes


@with_peft
def test_none_leaves_out_the_one_beside_the_weights_and_needs_no_peft(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = ModelSource(str(folder), device="cpu", peft="none")
    alone = logits(source(llama_folder(tmp_path / "alone")))
    assert torch.equal(logits(base), alone)
    assert load_model(base).published == {"peft_adapter": "none"}
    monkeypatch.setattr(peft_adapter, "find_spec", lambda _: None)
    assert torch.equal(logits(base), alone)


@with_peft
def test_an_adapter_takes_the_place_of_the_one_beside_the_weights(folder: Path, adapter: Path) -> None:
    from safetensors.torch import load_file, save_file

    wanted = logits(ModelSource(str(folder), device="cpu", peft=str(adapter)))
    (folder / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    other = {name: 2 * value for name, value in load_file(adapter / "adapter_model.safetensors").items()}
    save_file(other, folder / "adapter_model.safetensors")
    assert not torch.equal(logits(source(folder)), wanted)
    assert torch.equal(logits(ModelSource(str(folder), device="cpu", peft=str(adapter))), wanted)


def test_a_place_without_an_adapter_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        PeftAdapterError, match=r"holds no adapter: expected a folder or a hub id with adapter_config\.json"
    ):
        load_model(ModelSource(str(folder), device="cpu", peft=str(tmp_path)))


@with_peft
def test_an_adapter_of_another_model_is_refused(folder: Path, adapter: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = adapter / "adapter_model.safetensors"
    matrices = load_file(file)
    given = ModelSource(str(folder), device="cpu", peft=str(adapter))
    save_file({name.replace("layers.1", "layers.9"): value for name, value in matrices.items()}, file)
    with pytest.raises(PeftAdapterError, match=r"is none of .*: it (lacks|has unknown)"):
        load_model(given)
    save_file({name: torch.cat([value, value], -1) for name, value in matrices.items()}, file)
    with pytest.raises(PeftAdapterError, match="adapter"):
        load_model(given)
    file.unlink()
    with pytest.raises(PeftAdapterError):
        load_model(given)


@with_peft
def test_an_adapter_made_for_another_base_is_noted(folder: Path, adapter: Path) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "org/other"}))
    notes = load_model(ModelSource(str(folder), device="cpu", peft=str(adapter))).notes
    assert any("was made for org/other" in note for note in notes)


@with_peft
def test_streamed_weights_are_refused_with_an_adapter_and_taken_without(folder: Path) -> None:
    from hiddentap.models.loading import ModelLoadError, load_layer_by_layer

    with pytest.raises(ModelLoadError, match="has an adapter, which cannot be streamed; merge it"):
        load_layer_by_layer(source(folder))
    loaded, _ = load_layer_by_layer(ModelSource(str(folder), device="cpu", peft="none"))
    assert loaded.peft_adapter is None


@with_peft
def test_a_capture_names_its_adapter_is_resumed_with_it_alone_and_verified_with_it(
    folder: Path, adapter: Path, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "chats.jsonl", CHATS)

    def settings(peft: str | None) -> CaptureSettings:
        return CaptureSettings(ModelSource(str(folder), peft=peft), (str(rows),), tmp_path / "out", (1, 3), exact=True)

    capture_dataset(settings(str(adapter)))
    model = CapturedDataset(tmp_path / "out").description.model
    assert (model["peft_adapter"], len(model["peft_adapter_sha256"])) == (str(adapter.resolve()), 64)
    with pytest.raises(UsageError, match="peft_adapter"):
        capture_dataset(settings(None))
    report = verify(tmp_path / "out")
    assert (report.ok, report.compared) == (True, len(CHATS))
    assert verify(tmp_path / "out", model=str(folder)).ok
    assert (
        CliRunner().invoke(inspect, [str(tmp_path / "out")], standalone_mode=False).output.count(str(adapter.resolve()))
        == 1
    )
    (adapter / "adapter_model.safetensors").write_bytes(
        (adapter / "adapter_model.safetensors").read_bytes()[:-4] + b"\0\0\0\0"
    )
    assert any("the adapter of" in str(finding) for finding in verify(tmp_path / "out").findings)


@with_peft
def test_a_capture_without_the_adapter_beside_the_weights_is_verified_without_it(folder: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "chats.jsonl", CHATS)
    source_ = ModelSource(str(folder), peft="none")
    capture_dataset(CaptureSettings(source_, (str(rows),), tmp_path / "out", (1, 3), exact=True))
    assert CapturedDataset(tmp_path / "out").description.model["peft_adapter"] == "none"
    assert verify(tmp_path / "out").ok


def test_it_is_refused_for_vllm_which_would_leave_it_out(folder: Path) -> None:
    with pytest.raises(PeftAdapterError, match="--engine vllm would leave out"):
        describe_model(source(folder))
