"""A model that does not fit in memory is compared with layer by layer from disk: the same bits, the same verdicts."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from hiddentap.capture.verify import Report, forwards, verify
from hiddentap.capture.verify.forwards import InMemory, Lockstep
from hiddentap.capture.verify.plain_forward import NoReferenceError, PlainForward
from hiddentap.models import loading_memory
from hiddentap.models.checkpoint import CheckpointError
from hiddentap.models.loading import ModelSource, load_mapped_layers, load_model
from hiddentap.models.loading_memory import ModelTooLargeError
from support import tiny
from support.captured import captured, plain_states
from support.damage import Columns, rewrite
from support.model_folder import VOCAB, model_folder
from support.published import Form, float8_blocks, fp8_config, publish
from support.templates import CHATML, byte_tokenizer

LAYERS_AT = {"mamba": "backbone.layers", "gpt2": "transformer.h"}
LENGTHS = (5, 12, 9)


def model_of(family: str) -> nn.Module:
    if family != "mamba":
        return tiny.build(family, vocab_size=VOCAB, pad_token_id=None).bfloat16()
    config = AutoConfig.for_model("mamba", vocab_size=VOCAB, hidden_size=32, num_hidden_layers=4, state_size=8)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).bfloat16()


def fp8_folder(folder: Path) -> Path:
    """A DeepSeek-V3 with experts, published in blocks of FP8 that its 24 rows do not fill."""
    model = tiny.build("deepseek_v3", vocab_size=VOCAB, pad_token_id=None, dtype=torch.bfloat16)
    published = publish(folder, model, Form(float8_blocks((24, 16)), fp8_config((24, 16)))).folder
    byte_tokenizer(published, CHATML)
    return published


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(loading_memory, "available_bytes", lambda _: 0)


def without_place(report: Report) -> Report:
    """The report without the words that tell how the forwards ran."""
    reference = re.sub(r", (in memory|layer by layer from disk .*)$", "", report.reference or "")
    return dataclasses.replace(report, reference=reference)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "deepseek_v3", "kimi_linear", "mamba"])
@pytest.mark.parametrize("how", [{"exact": True}, {"batch_tokens": 512}], ids=["exact", "batched"])
def test_the_report_is_that_of_a_model_in_memory(
    family: str, how: dict[str, object], tmp_path: Path, no_memory: Callable[[], None]
) -> None:
    out = captured(model_folder(tmp_path / "model", model_of(family)), tmp_path / "out", **how)
    in_memory = verify(out)
    assert in_memory.ok, str(in_memory)
    assert (in_memory.compared, (in_memory.reference or "").endswith(", in memory")) == (6, True)
    no_memory()
    from_disk = verify(out)
    assert without_place(from_disk) == without_place(in_memory)
    # An exact run is judged by the first forwards alone; rows of a batch, beside float32 too.
    differs = any(a.bit_equal < a.rows for a in in_memory.agreement)
    said = (
        r", layer by layer from disk \(it needs .* in float32, and 0.00 MB is free\): \d\.\d GB read in {} sweep\(s\)$"
    )
    assert re.search(said.format(1 + differs), from_disk.reference or ""), from_disk.reference
    assert not ("exact" in how and differs)


def test_a_streamed_capture_of_fp8_weights_is_compared_layer_by_layer(
    tmp_path: Path, no_memory: Callable[[], None]
) -> None:
    no_memory()
    out = captured(fp8_folder(tmp_path / "model"), tmp_path / "out", exact=True, stream_weights=True)
    report = verify(out)
    assert report.ok, str(report)
    assert "layer by layer from disk" in (report.reference or "")
    assert all(a.bit_equal == a.rows == report.rows for a in report.agreement)


def test_as_many_samples_share_a_sweep_as_their_states_leave_room_for(
    tmp_path: Path, no_memory: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = captured(model_folder(tmp_path / "model", model_of("llama")), tmp_path / "out", exact=True)
    together = verify(out)
    no_memory()
    monkeypatch.setattr(forwards, "available_bytes", lambda _: 0)
    alone = verify(out)
    assert without_place(alone) == without_place(together)
    assert (alone.reference or "").endswith("read in 6 sweep(s)")


@pytest.mark.parametrize("how", [{"exact": True}, {"batch_tokens": 512}], ids=["exact", "batched"])
def test_a_wrong_layer_is_named(how: dict[str, object], tmp_path: Path, no_memory: Callable[[], None]) -> None:
    folder = model_folder(tmp_path / "model", model_of("deepseek_v3"))
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    out = captured(folder, tmp_path / "out", layer_ids=(0, 1, 2), **how)

    def off_by_one(columns: Columns) -> None:
        states = plain_states(model, columns["input_ids"])
        columns["aux_hidden_states"] = torch.stack(states[2:5], 1)

    rewrite(out, off_by_one)
    no_memory()
    whats = {finding.what.split(" in ")[0] for finding in verify(out).findings}
    assert whats == {f"stored layer {k} matches boundary {k + 2}, not {k + 1} as declared" for k in range(3)}


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "mamba", "fp8"])
@pytest.mark.parametrize("wide", [False, True], ids=["bfloat16", "float32"])
def test_states_and_logits_have_the_bits_of_forwards_in_memory(family: str, wide: bool, tmp_path: Path) -> None:
    folder = fp8_folder(tmp_path) if family == "fp8" else model_folder(tmp_path / "model", model_of(family))
    source, path = ModelSource(str(folder), device="cpu"), LAYERS_AT.get(family, "model.layers")
    whole = load_model(source)
    apart, layers = load_mapped_layers(source, path)
    samples = [tiny.token_ids(1, length, seed=length)[0] for length in LENGTHS]
    found = []
    for loaded, run in ((whole, InMemory(whole)), (apart, Lockstep(apart, layers, ""))):
        plain = PlainForward(loaded.model, path, 4)
        # The probe of the first model ran before the forwards, that of the second together with them.
        calls = [partial(plain.probe, samples[0]), *(partial(plain, ids) for ids in samples)]
        if wide:
            with run.in_float32():
                found.append(run(calls)[1:])
        else:
            found.append(run(calls)[1:])
    for one, other in zip(*found, strict=True):
        assert len(one.states) == 6
        assert {key: state.dtype for key, state in one.states.items()} == {k: s.dtype for k, s in other.states.items()}
        assert [key for key, state in one.states.items() if not torch.equal(state, other.states[key])] == []
        assert torch.equal(one.logits, other.logits)
    # Nothing is left in memory, nor in another dtype.
    assert all(p.device.type == "meta" for layer in layers.modules for p in layer.parameters())
    dtypes = [{name: p.dtype for name, p in loaded.model.named_parameters()} for loaded in (whole, apart)]
    assert dtypes[0] == dtypes[1]


def test_one_layer_is_in_memory_at_a_time_and_is_read_once_for_all_samples(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", model_of("deepseek_v3"))
    loaded, layers = load_mapped_layers(ModelSource(str(folder), device="cpu"), "model.layers")
    held: list[tuple[int, ...]] = []

    def note(_module: nn.Module, _args: object) -> None:
        there = [all(p.device.type != "meta" for p in layer.parameters()) for layer in layers.modules]
        held.append(tuple(i for i, is_there in enumerate(there) if is_there))

    for layer in layers.modules:
        layer.register_forward_pre_hook(note)
    before = layers.bytes_held
    plain = PlainForward(loaded.model, "model.layers", 4)
    ids = [tiny.token_ids(1, length)[0] for length in LENGTHS]
    Lockstep(loaded, layers, "")([partial(plain.probe, ids[0]), *(partial(plain, one) for one in ids)])
    assert held == [(k,) for k in range(4) for _ in range(4)]
    stored = sum(p.nbytes for name, p in tensors_of(folder).items() if ".layers." in name)
    assert layers.bytes_held - before == stored


def test_a_forward_that_fails_ends_the_others(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", model_of("llama"))
    loaded, layers = load_mapped_layers(ModelSource(str(folder), device="cpu"), "model.layers")
    ids = tiny.token_ids(1, 5)

    def failing() -> None:
        loaded.model(ids)
        raise ZeroDivisionError("in the second call")

    run = Lockstep(loaded, layers, "")
    with pytest.raises(ZeroDivisionError, match="in the second call"):
        run([lambda: loaded.model(ids), failing, lambda: loaded.model(ids)])
    with pytest.raises(NoReferenceError, match="a forward ended before decoder layer 0"):
        run([lambda: loaded.model(ids), lambda: None])
    with pytest.raises(NoReferenceError, match="a forward entered decoder layer 1 where layer 0 was next"):
        run([lambda: layers.modules[1](torch.zeros(1, 2, 32))])
    with pytest.raises(NoReferenceError, match="a forward entered decoder layer 0 after the last one"):
        run([lambda: (loaded.model(ids), loaded.model(ids))])
    assert [thread for thread in threading.enumerate() if thread.name == "plain-forward"] == []
    assert all(p.device.type == "meta" for layer in layers.modules for p in layer.parameters())


def test_layers_that_are_not_there_are_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", model_of("llama"))
    with pytest.raises(CheckpointError, match=r"LlamaForCausalLM has no layers at model\.blocks"):
        load_mapped_layers(ModelSource(str(folder), device="cpu"), "model.blocks")
    weights = tensors_of(folder)
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="only the layers of safetensors files can be mapped"):
        load_mapped_layers(ModelSource(str(folder), device="cpu"), "model.layers")


def test_room_in_float32_is_four_bytes_a_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    source = ModelSource(str(model_folder(tmp_path / "model", model)), device="cpu")
    need = 4 * sum(p.numel() for p in model.parameters())
    monkeypatch.setattr(loading_memory, "available_bytes", lambda _: need - 1)
    load_model(source)  # its own weights are mapped
    with pytest.raises(ModelTooLargeError, match=rf"needs {need / 1e6:.2f} MB of memory on cpu in float32"):
        load_model(source, in_float32=True)
    monkeypatch.setattr(loading_memory, "available_bytes", lambda _: need)
    load_model(source, in_float32=True)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")
