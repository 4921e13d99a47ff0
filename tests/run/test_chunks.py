"""Samples that run in chunks behind a cache: their rows, their refusals, and how much runs and is written at a time."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hiddentap import CapturedDataset, CaptureSettings, ModelSource, TextSettings, capture_dataset, verify
from hiddentap.capture.progress import Done, Silent
from hiddentap.capture.run import RunStopped, Stopping, estimate_run
from hiddentap.capture.run.engines.hugging_face.engine import HuggingFaceEngine
from hiddentap.capture.store import PlannedShardWriter, check_folder
from hiddentap.hooks import TapError
from hiddentap.models.errors import RunError, UsageError
from support import tiny
from support.architectures import build, token_ids
from support.model_folder import VOCAB, model_folder

LENGTHS = (3, 16, 17, 40, 70)
CHUNK = 16
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def rows_file(folder: Path, lengths: Sequence[int] = LENGTHS) -> Path:
    records = [{"id": f"s{n}", "input_ids": token_ids(1, n, seed=n).tolist()[0]} for n in lengths]
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return path


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return rows_file(tmp_path)


def settings(model: Path, rows: Path, out: Path, **fields: Any) -> CaptureSettings:
    given = {"layer_ids": (0, 2), "final": "both", "prefill_chunk": CHUNK} | fields
    return CaptureSettings(model=ModelSource(str(model)), data=(str(rows),), out=out, **given)


def largest_change(found: Tensor, expected: Tensor) -> float:
    """By how much of its length the row (S, H) that differs most differs."""
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "qwen3", "deepseek_v3", "kimi_linear"])
def test_rows_in_chunks_are_those_of_the_whole_forward_within_rounding(family: str, rows: Path, tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", tiny.build(family, vocab_size=VOCAB, pad_token_id=None))
    capture_dataset(settings(model, rows, tmp_path / "out"))
    plain, norms = AutoModelForCausalLM.from_pretrained(model).eval(), []
    plain.model.norm.register_forward_pre_hook(lambda _, args: norms.append(args[0][0]))
    dataset = CapturedDataset(tmp_path / "out")
    assert [len(dataset[i]["input_ids"]) for i in range(len(dataset))] == list(LENGTHS)
    for item in (dataset[i] for i in range(len(dataset))):
        with torch.no_grad():
            hs = plain(item["input_ids"][None].long(), output_hidden_states=True, use_cache=False).hidden_states
        assert largest_change(item["aux_hidden_states"][:, 0], hs[1][0]) < 1e-5
        assert largest_change(item["aux_hidden_states"][:, 1], hs[3][0]) < 1e-5
        assert largest_change(item["pre_norm"], norms.pop()) < 1e-5
        assert largest_change(item["post_norm"], hs[4][0]) < 1e-5
    assert check_folder(tmp_path / "out") == []


def test_top_logits_in_chunks_are_those_of_the_whole_forward(llama: Path, rows: Path, tmp_path: Path) -> None:
    capture_dataset(settings(llama, rows, tmp_path / "out", final="none", top_logits=5))
    plain, item = AutoModelForCausalLM.from_pretrained(llama).eval(), CapturedDataset(tmp_path / "out")[4]
    with torch.no_grad():
        top = plain(item["input_ids"][None].long()).logits[0].topk(5)
    torch.testing.assert_close(item["topk_logits"], top.values, atol=1e-4, rtol=1e-5)
    assert (item["topk_ids"] == top.indices).float().mean() > 0.99  # near ties may change places


def test_no_forward_and_no_write_is_longer_than_a_chunk_and_layers_after_the_last_tap_never_run(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[int, ...]] = []
    written: list[tuple[int, int]] = []
    forward, write = HuggingFaceEngine.forward, PlannedShardWriter.write

    def noted_forward(self: HuggingFaceEngine, batch: Any) -> Any:
        ran.append(tuple(batch.input_ids.shape))
        cache = self._sample_cache
        output = forward(self, batch)
        if cache._cache is not None:
            assert [layer.get_seq_length() for layer in cache._cache.layers] == [batch.chunk.end, 0, 0, 0]
        return output

    def noted_write(self: PlannedShardWriter, row_start: int, columns: Any) -> None:
        if "aux_hidden_states" in columns:
            written.append((row_start, len(columns["aux_hidden_states"])))
        write(self, row_start, columns)

    monkeypatch.setattr(HuggingFaceEngine, "forward", noted_forward)
    monkeypatch.setattr(PlannedShardWriter, "write", noted_write)
    rows = rows_file(tmp_path, (5, 5, 40))
    capture_dataset(settings(llama, rows, tmp_path / "out", layer_ids=(0,), final="none", batch_tokens=512))
    assert ran == [(2, 5), (1, 16), (1, 16), (1, 8)]
    assert written == [(0, 10), (10, 16), (26, 16), (42, 8)]


def test_a_chunk_as_long_as_every_sample_changes_no_bit(llama: Path, rows: Path, tmp_path: Path) -> None:
    capture_dataset(settings(llama, rows, tmp_path / "chunks", prefill_chunk=70, batch_tokens=100))
    capture_dataset(settings(llama, rows, tmp_path / "whole", prefill_chunk=None, batch_tokens=100))
    for one, other in zip(CapturedDataset(tmp_path / "chunks"), CapturedDataset(tmp_path / "whole"), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in ("aux_hidden_states", "pre_norm", "post_norm"))


def with_large_embedding(folder: Path, token: int) -> Path:
    """A model whose residual stream holds a value that no float16 holds, at this token alone."""
    model = tiny.build_llama(vocab_size=VOCAB, pad_token_id=None, tie_word_embeddings=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[token, 3] = 1e5
    return model_folder(folder, model)


@pytest.mark.parametrize("positions", [(2,), (20, 39), (0, 15, 16, 30)])
def test_a_sample_with_bad_values_is_rejected_once_as_it_is_when_it_runs_whole(
    positions: tuple[int, ...], tmp_path: Path
) -> None:
    model = with_large_embedding(tmp_path / "model", 200)
    ids = {n: token_ids(1, n, seed=n)[0] for n in (5, 40, 50)}
    ids[40][list(positions)] = 200
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"id": f"s{n}", "input_ids": row.tolist()}) for n, row in ids.items()))
    rejects = []
    for chunk in (CHUNK, None):
        out = tmp_path / f"out-{chunk}"
        summary = capture_dataset(settings(model, rows, out, prefill_chunk=chunk, store_dtype="float16"))
        assert (summary.captured, summary.rejected) == (2, 1)
        rejects.append(json.loads((out / "rejects.jsonl").read_text()))
    assert rejects[0] == rejects[1]
    first = rejects[0]["detail"]["faults"][0]
    assert (rejects[0]["id"], first["first_token"], first["rows"]) == ("s40", positions[0], len(positions))


def test_bad_values_end_the_run_by_the_id_of_their_sample_where_they_are_to(tmp_path: Path) -> None:
    model = with_large_embedding(tmp_path / "model", 200)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"id": "bad", "input_ids": [*range(10, 40), 200, 11]}))
    asked = {"on_bad_values": "raise", "store_dtype": "float16"}
    with pytest.raises(RunError, match=r"sample 'bad': .* 1 row\(s\), the first at token 30"):
        capture_dataset(settings(model, rows, tmp_path / "out", **asked))


class Watched(Silent):
    """Notes what was done; asks for the end after so many reports."""

    def __init__(self, stopping: Stopping | None = None, after: int = 0) -> None:
        self.done: list[Done] = []
        self._stopping, self._after = stopping, after

    def advanced(self, done: Done) -> None:
        self.done.append(done)
        if self._stopping is not None and len(self.done) == self._after:
            self._stopping.ask(15)


def test_progress_counts_a_sample_once_and_its_tokens_as_they_run(llama: Path, tmp_path: Path) -> None:
    progress = Watched()
    capture_dataset(settings(llama, rows_file(tmp_path, (40,)), tmp_path / "out"), progress)
    assert [(d.count, d.tokens) for d in progress.done if d.tokens] == [(0, 16), (0, 16), (1, 8)]


def test_a_run_that_was_stopped_between_chunks_resumes_to_the_same_bytes(llama: Path, tmp_path: Path) -> None:
    rows = rows_file(tmp_path, (40, 41, 42, 43, 44, 45, 46, 47))
    asked = {"shard_rows": 50, "batch_tokens": 64}
    capture_dataset(settings(llama, rows, tmp_path / "whole", **asked))
    stopping = Stopping()
    with pytest.raises(RunStopped):
        capture_dataset(settings(llama, rows, tmp_path / "out", **asked), Watched(stopping, after=5), stopping)
    left = len(list((tmp_path / "out" / "shards").glob("*.safetensors")))
    assert left < 8
    capture_dataset(settings(llama, rows, tmp_path / "out", **asked))
    for shard in sorted((tmp_path / "whole" / "shards").iterdir()):
        assert (tmp_path / "out" / "shards" / shard.name).read_bytes() == shard.read_bytes()


def test_a_folder_goes_on_with_chunks_of_its_own_length_only(llama: Path, rows: Path, tmp_path: Path) -> None:
    capture_dataset(settings(llama, rows, tmp_path / "out"))
    assert CapturedDataset(tmp_path / "out").description.json["prefill_chunk"] == CHUNK
    for other, said in ((8, "16 -> 8"), (None, "16 -> null")):
        with pytest.raises(UsageError, match=f"prefill_chunk: {said}"):
            capture_dataset(settings(llama, rows, tmp_path / "out", prefill_chunk=other))


def test_verify_compares_rows_of_chunks_with_whole_forwards(llama: Path, rows: Path, tmp_path: Path) -> None:
    capture_dataset(settings(llama, rows, tmp_path / "out"))
    report = verify(tmp_path / "out")
    assert report.ok
    assert report.compared == len(LENGTHS)


def test_a_dry_run_times_chunks(llama: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hiddentap.capture.run.pacing.timing.SECONDS", 0.2)
    assert estimate_run(settings(llama, rows, tmp_path / "out")).tokens_per_second > 0


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "jamba"])
def test_a_model_whose_cache_cannot_go_on_is_refused_for_chunks_alone(family: str, rows: Path, tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", build(family, vocab_size=VOCAB))
    with pytest.raises(TapError, match=r"chunks behind a cache .*without prefill_chunk \(--prefill-chunk\)"):
        capture_dataset(settings(model, rows, tmp_path / "out", final="none"))
    assert capture_dataset(settings(model, rows, tmp_path / "out", final="none", prefill_chunk=None)).captured == 5


def test_chunks_shorter_than_a_rotary_length_are_refused_where_a_sample_crosses_it(tmp_path: Path) -> None:
    model = build("llama", rope_parameters=dict(LONGROPE), max_position_embeddings=256, vocab_size=VOCAB)
    folder = model_folder(tmp_path / "model", model)
    long = rows_file(tmp_path, (30, 70))
    with pytest.raises(UsageError, match=r"cannot run in chunks of 16: .* Take chunks of at least 33 tokens, or leave"):
        capture_dataset(settings(folder, long, tmp_path / "short", final="none"))
    capture_dataset(settings(folder, long, tmp_path / "out", final="none", prefill_chunk=33))
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    for item in CapturedDataset(tmp_path / "out"):
        with torch.no_grad():
            hs = plain(item["input_ids"][None].long(), output_hidden_states=True, use_cache=False).hidden_states
        assert largest_change(item["aux_hidden_states"][:, 1], hs[3][0]) < 1e-5


@pytest.mark.parametrize("family", ["glm_moe_dsa", "deepseek_v32"])
def test_chunks_past_the_budget_of_sparse_attention_are_refused(family: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", build(family, index_topk=16, vocab_size=VOCAB))
    long = rows_file(tmp_path, (40,))
    with pytest.raises(UsageError, match=r"selected positions, .* Leave prefill_chunk"):
        capture_dataset(settings(folder, long, tmp_path / "out", final="none"))


def test_a_chunk_that_does_not_fit_names_its_tokens_and_the_option(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = HuggingFaceEngine.forward

    def limited(self: HuggingFaceEngine, batch: Any) -> Any:
        if batch.chunk is not None and batch.chunk.end > 16:
            raise torch.OutOfMemoryError("no room")
        return forward(self, batch)

    monkeypatch.setattr(HuggingFaceEngine, "forward", limited)
    with pytest.raises(
        RunError, match=r"chunk of tokens 16\.\.31 of sample 's40' of 40 tokens does not .* lower --prefill-chunk"
    ):
        capture_dataset(settings(llama, rows_file(tmp_path, (40,)), tmp_path / "out"))


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"exact": True}, "exact runs every sample in one plain forward"),
        ({"stream_weights": True}, "stream_weights runs each layer once over whole samples"),
        ({"tp": 2}, "tp sends whole batches"),
        ({"compile": "on"}, "compile=on would compile"),
    ],
)
def test_what_runs_samples_whole_excludes_chunks(other: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{text}.*exclude each other"):
        settings(tmp_path, tmp_path, tmp_path, **other)


def test_a_chunk_has_a_token_at_least(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="prefill_chunk must be at least 1"):
        settings(tmp_path, tmp_path, tmp_path, prefill_chunk=0)
    assert settings(tmp_path, tmp_path, tmp_path, text=TextSettings(max_length=131072)).prefill_chunk == CHUNK
