"""A run whose layers are read while it runs writes the rows of a run whose model is in memory."""

from __future__ import annotations

import gc
import json
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from hiddentap import CapturedDataset, CaptureSettings, ModelSource, capture_dataset
from hiddentap.capture.run import RunStopped, Stopping
from hiddentap.capture.run.engines.hugging_face import streamed
from hiddentap.capture.run.engines.hugging_face.streamed import StreamedBackend, StreamedEngine
from hiddentap.models.errors import RunError, UsageError
from support import architectures
from support.model_folder import VOCAB, chat, llama_folder, model_folder, write_rows
from support.shards import open_files

ROWS = [chat("Is it?" * (1 + i % 5), "Yes, " * (1 + (7 * i) % 11), id=f"s{i}") for i in range(24)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(tmp_path_factory.mktemp("model"), num_hidden_layers=6)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", ROWS)


def settings(model: Path, data: Path, out: Path, **asked: Any) -> CaptureSettings:
    return CaptureSettings(ModelSource(str(model), device="cpu"), (str(data),), out, **{"layer_ids": (1, 3)} | asked)


def tensors(out: Path) -> dict[str, torch.Tensor]:
    """Every tensor of every shard."""
    found = {}
    for path in sorted((out / "shards").glob("*.safetensors")):
        with safe_open(path, framework="pt") as shard:
            found |= {f"{path.name}/{name}": shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
    return found


def same_rows(first: Path, second: Path) -> bool:
    a, b = tensors(first), tensors(second)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    "asked",
    [
        {"exact": True},
        {"exact": True, "final": "none", "layer_ids": (0,)},
        {"batch_tokens": 200},
        {"batch_tokens": 200, "final": "both", "top_logits": 3, "head": True},
        {"batch_tokens": 200, "shard_rows": 300},
    ],
    ids=["exact", "exact-early-stop", "batched", "logits-and-head", "several-shards"],
)
def test_streamed_rows_have_the_bits_of_rows_of_a_model_in_memory(
    asked: dict[str, Any], folder: Path, rows: Path, tmp_path: Path
) -> None:
    plain = capture_dataset(settings(folder, rows, tmp_path / "plain", **asked))
    layer_by_layer = capture_dataset(settings(folder, rows, tmp_path / "streamed", stream_weights=True, **asked))
    assert (plain.captured, layer_by_layer.captured) == (24, 24)
    assert same_rows(tmp_path / "plain", tmp_path / "streamed")
    heads = [path.read_bytes() for path in sorted(tmp_path.glob("*/head/*"))]
    assert heads[: len(heads) // 2] == heads[len(heads) // 2 :]


def test_a_streamed_run_leaves_no_file_of_the_checkpoint_open(folder: Path, rows: Path, tmp_path: Path) -> None:
    gc.collect()
    gc.disable()  # whatever is left to it keeps its files until it comes
    try:
        capture_dataset(settings(folder, rows, tmp_path / "out", stream_weights=True))
        assert open_files(folder) == 0
    finally:
        gc.enable()
    capture_dataset(
        settings(folder, rows, tmp_path / "out", stream_weights=True)
    )  # finds all done, and opens no engine
    gc.collect()
    assert open_files(folder) == 0


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "zamba2", "kimi_linear", "qwen2_moe"])
def test_other_families_stream_exactly_too(family: str, rows: Path, tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", architectures.build(family, vocab_size=VOCAB, pad_token_id=None))
    for name, stream in (("plain", False), ("streamed", True)):
        capture_dataset(settings(model, rows, tmp_path / name, exact=True, stream_weights=stream))
    assert same_rows(tmp_path / "plain", tmp_path / "streamed")


def test_each_layer_is_read_once_a_block(folder: Path, rows: Path, tmp_path: Path, monkeypatch: Any) -> None:
    blocks: list[tuple[int, int]] = []
    forwards = StreamedEngine.forwards

    def counted(self: StreamedEngine, batches: Any, **how: Any) -> Any:
        before = self._sweep.store.reader.bytes_read
        outputs = forwards(self, batches, **how)
        blocks.append((len(batches), self._sweep.store.reader.bytes_read - before))
        return outputs

    monkeypatch.setattr(StreamedEngine, "forwards", counted)
    asked = {"batch_tokens": 100, "shard_rows": 300, "final": "none", "stream_weights": True}
    capture_dataset(settings(folder, rows, tmp_path / "out", block_tokens=900, **asked))
    layer = 4 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32 + 2 * 32)
    assert len(blocks) > 1
    assert all(count > 3 for count, _ in blocks[:-1])
    assert {read for _, read in blocks} == {4 * layer}  # layers 0 to 3: the last tap is the output of layer 3


def test_a_run_goes_on_where_the_other_kind_of_run_stopped(folder: Path, rows: Path, tmp_path: Path) -> None:
    asked = {"batch_tokens": 100, "shard_rows": 300}
    capture_dataset(settings(folder, rows, tmp_path / "plain", **asked))
    capture_dataset(settings(folder, rows, tmp_path / "mixed", **asked))
    shards = sorted((tmp_path / "mixed" / "shards").glob("*.safetensors"))
    assert len(shards) > 3
    for path in shards[1::2]:
        path.unlink()
    capture_dataset(settings(folder, rows, tmp_path / "mixed", stream_weights=True, **asked))
    assert same_rows(tmp_path / "plain", tmp_path / "mixed")


def test_a_stop_between_two_layers_keeps_what_is_sealed_and_the_same_call_goes_on(
    folder: Path, rows: Path, tmp_path: Path
) -> None:
    class StopAfter(Stopping):
        calls = 0

        def check(self) -> None:
            self.calls += 1
            if self.calls > 40:
                raise RunStopped(signal.SIGINT)

    asked = {"batch_tokens": 100, "shard_rows": 300, "stream_weights": True, "block_tokens": 300}
    with pytest.raises(RunStopped):
        capture_dataset(settings(folder, rows, tmp_path / "out", **asked), stopping=StopAfter())
    sealed = len(list((tmp_path / "out" / "shards").glob("*.safetensors")))
    capture_dataset(settings(folder, rows, tmp_path / "whole", **asked))
    assert 0 < sealed < len(list((tmp_path / "whole" / "shards").glob("*.safetensors")))
    capture_dataset(settings(folder, rows, tmp_path / "out", **asked))
    assert same_rows(tmp_path / "out", tmp_path / "whole")


@pytest.mark.parametrize("room", [1, 500], ids=["none", "for a part"])
def test_states_that_the_device_has_no_room_for_wait_in_host_memory(
    room: int, folder: Path, rows: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    aside, most = streamed.in_host_memory, [0]

    @contextmanager
    def counted(states: list[torch.Tensor]) -> Iterator[None]:
        with aside(states):
            assert not any(state.untyped_storage().nbytes() for state in states)
            most[0] = max(most[0], len(states))
            yield

    monkeypatch.setattr(streamed, "in_host_memory", counted)
    monkeypatch.setattr(StreamedBackend, "_device_positions", lambda *_: room)
    asked = {"batch_tokens": 100, "shard_rows": 300, "final": "both"}
    capture_dataset(settings(folder, rows, tmp_path / "plain", **asked))
    capture_dataset(settings(folder, rows, tmp_path / "out", stream_weights=True, block_tokens=1500, **asked))
    assert most == [2]  # what enters the layer, and the rows of both taps
    assert same_rows(tmp_path / "plain", tmp_path / "out")


def test_a_block_that_does_not_fit_is_halved(folder: Path, rows: Path, tmp_path: Path, monkeypatch: Any) -> None:
    forwards, sizes = StreamedEngine.forwards, []

    def small_device(self: StreamedEngine, batches: Any, **how: Any) -> Any:
        positions = sum(batch.positions.B * batch.positions.S for batch in batches)
        sizes.append(positions)
        if positions > 700:
            raise torch.OutOfMemoryError("no room")
        return forwards(self, batches, **how)

    asked = {"batch_tokens": 100, "shard_rows": 300}
    capture_dataset(settings(folder, rows, tmp_path / "plain", **asked))
    monkeypatch.setattr(StreamedEngine, "forwards", small_device)
    capture_dataset(settings(folder, rows, tmp_path / "out", stream_weights=True, **asked))
    assert max(sizes) > 700
    assert same_rows(tmp_path / "plain", tmp_path / "out")


def test_a_shard_that_does_not_fit_alone_is_named_with_the_way_out(
    folder: Path, rows: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    def no_room(self: StreamedEngine, batches: Any, **how: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(StreamedEngine, "forwards", no_room)
    with pytest.raises(RunError, match=r"the states of one shard, \d+ positions, do not fit .* lower --shard-rows"):
        capture_dataset(settings(folder, rows, tmp_path / "out", stream_weights=True))


def test_a_sample_with_bad_values_is_rejected_as_in_a_plain_run(folder: Path, rows: Path, tmp_path: Path) -> None:
    model = shutil.copytree(folder, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    (q,) = AutoTokenizer.from_pretrained(folder)("q", add_special_tokens=False).input_ids
    weights["model.embed_tokens.weight"][q] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    data = write_rows(tmp_path / "rows.jsonl", [*ROWS, chat("A queue?", "Yes.", id="bad")])
    for name, stream in (("plain", False), ("streamed", True)):
        summary = capture_dataset(settings(model, data, tmp_path / name, batch_tokens=100, stream_weights=stream))
        assert summary.captured == 24
    assert same_rows(tmp_path / "plain", tmp_path / "streamed")
    assert (tmp_path / "plain/rejects.jsonl").read_bytes() == (tmp_path / "streamed/rejects.jsonl").read_bytes()


@pytest.mark.parametrize("name", ["model.layers.2.self_attn.q_norm.weight", "model.layers.4.mlp.up_proj.bias"])
def test_weights_that_a_layer_has_no_place_for_are_refused_as_in_a_plain_run(
    name: str, folder: Path, rows: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(folder, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    save_file({**weights, name: torch.ones(8)}, model / "model.safetensors", metadata={"format": "pt"})
    for stream in (False, True):
        with pytest.raises(UsageError, match=f"has no place for them: {name}. The layers would compute without them"):
            capture_dataset(settings(model, rows, tmp_path / "out", stream_weights=stream))


def test_stored_buffers_that_models_pass_over_do_not_keep_weights_from_being_streamed(
    folder: Path, rows: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(folder, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    old = {f"model.layers.{k}.self_attn.rotary_emb.inv_freq": torch.ones(4) for k in range(6)}
    save_file(weights | old, model / "model.safetensors", metadata={"format": "pt"})
    capture_dataset(settings(folder, rows, tmp_path / "plain", exact=True))
    capture_dataset(settings(model, rows, tmp_path / "streamed", exact=True, stream_weights=True))
    assert same_rows(tmp_path / "plain", tmp_path / "streamed")


def test_the_header_says_that_weights_were_streamed(folder: Path, rows: Path, tmp_path: Path) -> None:
    capture_dataset(settings(folder, rows, tmp_path / "out", stream_weights=True))
    assert len(CapturedDataset(tmp_path / "out")) == 24
    with safe_open(tmp_path / "out/shards/shard-000000.safetensors", framework="pt") as shard:
        described = json.loads(shard.metadata()["hiddentap"])
    assert described["metadata"]["made_with"]["weights"] == "streamed"


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"stream_weights": True, "tp": 2}, "stream_weights and tp exclude each other"),
        ({"stream_weights": True, "compile": "on"}, "stream_weights and compile=on exclude each other"),
        ({"block_tokens": 10}, "block_tokens .* is the size of a block of streamed weights"),
    ],
)
def test_settings_that_streamed_weights_exclude_are_refused_before_a_model_is_loaded(
    asked: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=text):
        settings(tmp_path / "nothing", tmp_path / "nothing", tmp_path / "out", **asked)


def test_a_device_map_is_refused(folder: Path, rows: Path, tmp_path: Path) -> None:
    source = ModelSource(str(folder), device_map="auto")
    with pytest.raises(UsageError, match="a streamed model lies on one device"):
        capture_dataset(CaptureSettings(source, (str(rows),), tmp_path / "out", layer_ids=(1,), stream_weights=True))


def test_a_checkpoint_without_an_output_head_streams_where_nothing_asks_for_it(
    folder: Path, rows: Path, tmp_path: Path
) -> None:
    headless = Path(shutil.copytree(folder, tmp_path / "model"))
    stored = load_file(headless / "model.safetensors")
    del stored["lm_head.weight"]
    save_file(stored, headless / "model.safetensors", {"format": "pt"})
    capture_dataset(settings(folder, rows, tmp_path / "plain", exact=True))
    capture_dataset(settings(headless, rows, tmp_path / "streamed", exact=True, stream_weights=True))
    assert same_rows(tmp_path / "plain", tmp_path / "streamed")
    for asked in ({"head": True}, {"top_logits": 3}, {"stream_weights": False}):
        with pytest.raises(UsageError, match=r"lm_head\.weight"):
            capture_dataset(settings(headless, rows, tmp_path / "no", **{"stream_weights": True} | asked))
