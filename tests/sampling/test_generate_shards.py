"""A generation in a folder: the rows of its results, readable as any capture, and nothing silent."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from hiddentap import CapturedDataset
from hiddentap.capture.progress import Done, Silent
from hiddentap.capture.sampling import Aborts, Prompt, SamplingParams, generate_with_capture
from hiddentap.capture.store import Manifest, check_folder
from support.generation import LAYER_IDS, PROMPTS, PlainForward, hooks_of, lively, row_error

PARAMS = SamplingParams(
    seed=3, top_k=12, max_new_tokens=6, ignore_eos=True, return_sampling_mask=True, return_logprob=True, top_logits=3
)


def run(out: Path, prompts: Any = PROMPTS, params: Any = PARAMS, **options: Any) -> list[Any]:
    return generate_with_capture(lively("llama"), prompts, params, layer_ids=LAYER_IDS, out=out, **options)


def errors(out: Path) -> list[str]:
    return [finding.what for finding in check_folder(out) if finding.severity == "error"]


@pytest.mark.parametrize("options", [{}, {"shard_rows": 20, "prompt_lookup": 2, "final": "both"}], ids=str)
def test_the_rows_of_a_folder_are_those_of_the_results(tmp_path: Path, options: dict[str, Any]) -> None:
    results = run(tmp_path / "out", **options)
    dataset = CapturedDataset(tmp_path / "out")
    assert len(dataset) == len(results)
    for result in results:
        item = dataset[dataset.index_of(str(result.index))]
        for name, rows in result.rows.items():
            torch.testing.assert_close(item[name], rows.to(item[name].dtype), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(item["sampling_mask_lengths"], result.sampling_mask.lengths)
        assert torch.equal(item["sampling_mask_ids"], result.sampling_mask.values)
    assert errors(tmp_path / "out") == []
    assert Manifest.read(tmp_path / "out/manifest.json").complete


def test_rows_of_a_folder_are_those_of_a_plain_forward(tmp_path: Path) -> None:
    run(tmp_path / "out", keep_rows=False)
    for item in CapturedDataset(tmp_path / "out"):  # type: ignore[attr-defined]
        plain = PlainForward(lively("llama"), item["input_ids"].tolist())
        assert row_error(item["aux_hidden_states"], plain.layers(LAYER_IDS)) < 1e-5


def test_a_shard_is_sealed_when_it_has_its_rows_and_opens_with_safetensors_alone(tmp_path: Path) -> None:
    run(tmp_path / "out", shard_rows=20)
    shards = sorted((tmp_path / "out/shards").iterdir())
    assert len(shards) >= 3
    with safe_open(shards[0], "pt") as opened:
        assert opened.get_tensor("output_ids").dtype == torch.int32
        assert opened.get_tensor("sampling_mask_lengths").shape == opened.get_tensor("output_ids").shape


def test_a_header_says_what_the_rows_are(tmp_path: Path) -> None:
    run(tmp_path / "out")
    about = CapturedDataset(tmp_path / "out").metadata
    assert about["mode"] == "generation"
    assert about["model"]["class"] == "LlamaForCausalLM"
    assert about["taps"]["layer_ids"] == LAYER_IDS
    assert about["taps"]["boundaries"] == [1, 3, 4]
    assert about["compute_dtype"] == about["store_dtype"] == "float32"
    assert about["sampling"]["top_k"] == 12
    assert about["sampling"]["seed"] == 3
    assert "torch" in about["made_with"]


def test_without_rows_in_memory_results_keep_their_tokens(tmp_path: Path) -> None:
    kept, dropped = run(tmp_path / "a"), run(tmp_path / "b", keep_rows=False)
    assert [one.token_ids for one in kept] == [one.token_ids for one in dropped]
    assert all(one.rows == {} and one.sampling_mask is None for one in dropped)
    with pytest.raises(RuntimeError, match="result 0 has no rows of 'aux_hidden_states'"):
        _ = dropped[0].aux_hidden_states


def test_aborted_requests_and_those_without_a_token_are_rejects_with_their_reason(tmp_path: Path) -> None:
    aborts = Aborts()
    aborts.abort(1)
    params = [PARAMS] * len(PROMPTS)
    params[2] = SamplingParams(max_new_tokens=6, ignore_eos=True, return_sampling_mask=True)
    prompts = [Prompt(tuple(ids), f"name {place}", "file", place + 1) for place, ids in enumerate(PROMPTS)]
    run(tmp_path / "out", prompts, params, aborts=aborts, sampling_mask_max_tokens=20)
    dataset = CapturedDataset(tmp_path / "out")
    assert sorted(dataset[i]["sample_id"] for i in range(len(dataset))) == ["name 0", "name 3", "name 4", "name 5"]
    rejects = [json.loads(line) for line in (tmp_path / "out/rejects.jsonl").read_text().splitlines()]
    assert [(one["id"], one["line"], one["detail"]["code"]) for one in rejects] == [
        ("name 1", 2, "abort"),
        ("name 2", 3, "refused"),
    ]
    assert "Sampling support exceeds --sampling-mask-max-tokens=20" in rejects[1]["reason"]
    counts = Manifest.read(tmp_path / "out/manifest.json").counts
    assert counts["captured"] == 4
    assert counts["rejected"] == 2
    assert counts["finish_reasons"] == {"length": 4, "abort": 1, "refused": 1}
    assert errors(tmp_path / "out") == []


def test_nothing_but_rejects_is_a_complete_folder_too(tmp_path: Path) -> None:
    aborts = Aborts()
    aborts.abort(0)
    run(tmp_path / "out", [[5, 6]], aborts=aborts)
    assert len(CapturedDataset(tmp_path / "out")) == 0
    assert Manifest.read(tmp_path / "out/manifest.json").counts["rejected"] == 1


def test_a_folder_that_holds_something_is_refused_and_left_alone(tmp_path: Path) -> None:
    run(tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    with pytest.raises(ValueError, match="is not empty; a generation needs an empty or a new folder"):
        run(tmp_path / "out")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before


def test_rows_of_ended_requests_are_let_go_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hiddentap.capture.sampling.generation.request import GenerationRequest

    ended: list[GenerationRequest] = []
    release = GenerationRequest.release
    monkeypatch.setattr(GenerationRequest, "release", lambda one: (release(one), ended.append(one)))
    run(tmp_path / "out", keep_rows=False)
    assert [request.rows.columns() for request in ended] == [{}] * len(PROMPTS)


class FailsAt(Silent):
    """A progress that ends the generation after so many requests."""

    def __init__(self, count: int) -> None:
        self._left = count

    def advanced(self, done: Done) -> None:
        self._left -= done.count
        if self._left == 0:
            raise RuntimeError("the end")


def test_what_is_sealed_stays_when_a_generation_fails_and_the_rest_goes(tmp_path: Path) -> None:
    hooks = hooks_of(lively("llama"))
    with pytest.raises(RuntimeError, match="the end"):
        run(tmp_path / "out", shard_rows=8, max_batch=1, progress=FailsAt(4))
    with pytest.raises(RuntimeError, match="not complete"):
        CapturedDataset(tmp_path / "out")
    left = CapturedDataset(tmp_path / "out", allow_incomplete=True)
    assert 1 <= len(left) <= 4
    assert [path.suffix for path in (tmp_path / "out/shards").iterdir()] == [".safetensors"] * len(left.places.shards)
    assert hooks_of(lively("llama")) == hooks
