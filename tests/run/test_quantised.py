"""A checkpoint in 8 or 4 bits is captured as its own forward computes it, and `verify` compares it so."""

from pathlib import Path

import pytest
import torch

from hiddentap import CapturedDataset, CaptureSettings, ModelSource, capture_dataset
from hiddentap.capture.store import OutputFolder
from hiddentap.capture.verify import verify
from support import tiny
from support.model_folder import CHATS, VOCAB, write_rows
from support.published import Form, compressed_config, float8_rows, publish
from support.quantised import quantised_llama
from support.recorder import equal, record
from support.templates import CHATML, byte_tokenizer


def settings_of(model: Path, tmp_path: Path, *, exact: bool = False, **fields: object) -> CaptureSettings:
    data = write_rows(tmp_path / "rows.jsonl", CHATS)
    source = ModelSource(str(model), device="cpu", **fields)
    return CaptureSettings(source, (str(data),), tmp_path / "out", layer_ids=(0, 2), exact=exact)


@pytest.mark.parametrize("bits", [8, 4])
def test_an_exact_run_holds_the_bits_of_the_quantised_model(bits: int, tmp_path: Path) -> None:
    model = quantised_llama(tmp_path, bits)

    assert capture_dataset(settings_of(tmp_path / "quantised", tmp_path, exact=True)).captured == 5

    dataset = CapturedDataset(tmp_path / "out")
    for sample in (dataset[i] for i in range(5)):
        seen, _ = record(model, sample["input_ids"][None].long(), use_cache=False)
        for slot, layer in enumerate((0, 2)):
            expected = seen.of(f"model.layers.{layer}")[0].outputs[""][0]
            assert equal(sample["aux_hidden_states"][:, slot], expected)
        assert equal(sample["pre_norm"], seen.of("model.layers.3")[0].outputs[""][0])


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "batched"])
@pytest.mark.parametrize("bits", [8, 4])
def test_verify_compares_a_quantised_model(bits: int, exact: bool, tmp_path: Path) -> None:
    quantised_llama(tmp_path, bits)
    capture_dataset(settings_of(tmp_path / "quantised", tmp_path, exact=exact))
    report = verify(tmp_path / "out", samples=5)
    assert (report.compared, report.findings) == (5, ())


def compressed(tmp_path: Path) -> Path:
    """A tiny Llama whose weights are float8 and whose own arithmetic rounds activations too."""
    pytest.importorskip("compressed_tensors", reason="see tests/requirements-peers.txt")
    dynamic = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    config = compressed_config(
        "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, activations=dynamic
    )
    model = tiny.build_llama(vocab_size=VOCAB, pad_token_id=None).to(torch.bfloat16)
    folder = publish(tmp_path, model, Form(float8_rows, config)).folder
    byte_tokenizer(folder, CHATML)
    return folder


@pytest.mark.parametrize(
    ("keep", "told"),
    [
        (False, {"method": "compressed-tensors", "weights": "dequantized", "activations": "not rounded"}),
        (True, {
            "method": "compressed-tensors", "weights": "as the quantizer computes them",
            "activations": "rounded as the checkpoint says",
        }),
    ],
    ids=["dequantized", "kept"],
)  # fmt: skip
def test_compressed_tensors_are_captured_and_compared_as_the_header_says(
    keep: bool, told: dict[str, str], tmp_path: Path
) -> None:
    capture_dataset(settings_of(compressed(tmp_path), tmp_path, keep_quantized=keep))
    (shard,) = OutputFolder(tmp_path / "out").sealed_shards().shards.values()
    assert shard.metadata["model"]["quantization"] == told
    report = verify(tmp_path / "out", samples=5)
    assert (report.compared, report.findings) == (5, ())


def test_a_model_that_is_here_and_cannot_be_loaded_is_a_finding(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny.build_llama(vocab_size=VOCAB, pad_token_id=None).save_pretrained(folder)
    byte_tokenizer(folder, CHATML)
    capture_dataset(settings_of(folder, tmp_path))
    (folder / "model.safetensors").write_bytes(b"cut")
    report = verify(tmp_path / "out")
    assert not report.ok
    (finding,) = report.findings
    assert "the captured model cannot be loaded to compare with it" in finding.what
