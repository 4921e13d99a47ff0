"""`hiddentap generate` as a user types it."""

import json
import resource
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hiddentap import CapturedDataset
from hiddentap.models.head import load_head
from support.architectures import build
from support.generation import PlainForward, greedy, row_error
from support.model_folder import CHATS, model_folder, write_rows

ROWS: list[dict[str, Any]] = [
    CHATS[0],
    {"id": "asked", "messages": [{"role": "user", "content": "Well?"}]},
    {"id": "text", "text": "Once upon a time"},
    {"id": "ids", "input_ids": [60, 61, 62]},
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "prompts.jsonl", ROWS)


@pytest.fixture
def run(run: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, str, str]]:
    """`hiddentap generate` in this process: (exit code, standard output, standard error)."""
    return partial(run, "generate")


def common(llama: Path, data: Path, tmp_path: Path) -> list[object]:
    out = tmp_path / "out"
    return ["--model", llama, "--data", data, "--layer-ids", "0,2", "--out", out, "--max-new-tokens", 6, "--ignore-eos"]


def prompt_of(item: dict[str, Any]) -> list[int]:
    return item["input_ids"][: int((item["output_ids"] < 0).sum()) + 1].tolist()


def test_prompts_are_answered_into_a_folder_and_summed_up(run, llama: Path, data: Path, tmp_path: Path) -> None:
    code, out, err = run(*common(llama, data, tmp_path), "--temperature", 0, "--final", "none")
    assert code == 0
    assert "4 captured, 0 rejected" in out
    assert "24 new" in out
    assert "1 last assistant turns were left out and written anew" in out
    assert "4 length" in out
    assert "0, 2 (layer_output), H = 32" in out
    assert " generating: 4 of 4 requests, " in err.splitlines()[0]
    model = AutoModelForCausalLM.from_pretrained(llama)
    tokenizer = AutoTokenizer.from_pretrained(llama)
    dataset = CapturedDataset(tmp_path / "out")
    prompts = [prompt_of(dataset[i]) for i in range(4)]
    assert [tokenizer.decode(ids) for ids in prompts[:3]] == [
        "<|im_start|>user\nHow far is it?<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\nWell?<|im_end|>\n<|im_start|>assistant\n",
        "Once upon a time",
    ]
    assert prompts[3] == [60, 61, 62]
    for i, prompt in enumerate(prompts):
        item = dataset[i]
        tokens = item["output_ids"][item["output_ids"] >= 0].tolist()
        assert tokens == greedy(model, prompt, 6)
        assert item["loss_mask"].tolist() == [0] * len(prompt) + [1] * 5
        assert (
            row_error(item["aux_hidden_states"], PlainForward(model, item["input_ids"].tolist()).layers([0, 2])) < 1e-5
        )
    assert [dataset[i]["sample_id"] for i in range(4)] == ["a", "asked", "text", "ids"]
    assert dataset[2]["line"] == 3


def test_sampling_flags_reach_the_sampler_and_its_outputs_the_folder(
    run, llama: Path, data: Path, tmp_path: Path
) -> None:
    flags = ["--seed", 7, "--temperature", 0.9, "--top-k", 5, "--sampling-mask", "--logprobs", "--top-logits", 3]
    code, _, _ = run(*common(llama, data, tmp_path), *flags, "--prompt-lookup", 2, "--prefill-chunk", 9)
    assert code == 0
    dataset = CapturedDataset(tmp_path / "out")
    item = dataset[2]
    written = item["output_ids"] >= 0
    assert item["sampling_mask_lengths"][written].tolist() == [5] * 6
    assert item["topk_ids"].shape[1] == 3
    assert torch.isfinite(item["logprobs"][written]).all()
    assert torch.isfinite(item["sampling_logprobs"][written]).all()
    about = dataset.metadata
    assert about["sampling"]["top_k"] == 5
    assert about["sampling"]["seed"] == 7
    assert about["steps"]["prompt_lookup"] == 2
    assert about["taps"]["final"] == "pre"
    assert about["data"][0]["name"] == str(data)
    assert about["tokenisation"]["tokenizer_sha256"]


def test_a_seed_gives_the_same_answers_again_and_other_ones_to_equal_rows(run, llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "same.jsonl", [{"text": "Once upon"}] * 3)
    tokens = []
    for name in ("a", "b"):
        out = tmp_path / name
        run(
            "--model",
            llama,
            "--data",
            data,
            "--layer-ids",
            "1",
            "--out",
            out,
            "--seed",
            1,
            "--max-new-tokens",
            8,
            "--quiet",
        )
        dataset = CapturedDataset(out)
        tokens.append([dataset[i]["output_ids"].tolist() for i in range(3)])
    assert tokens[0] == tokens[1]
    assert len({tuple(one) for one in tokens[0]}) == 3


def test_rows_that_are_no_prompts_are_rejected_with_their_reasons(run, llama: Path, tmp_path: Path) -> None:
    rows = [ROWS[2], {"foo": 1}, {"input_ids": [5, 600]}, {"messages": [{"role": "assistant", "content": "Yes."}]}]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    code, out, _ = run(*common(llama, data, tmp_path))
    assert code == 0
    assert "1 captured, 3 rejected" in out
    rejects = [json.loads(line) for line in (tmp_path / "out/rejects.jsonl").read_text().splitlines()]
    assert [(one["line"], one["detail"]["code"]) for one in rejects] == [
        (2, "no_known_field"),
        (3, "bad_prompt"),
        (4, "no_prompt"),
    ]
    assert "expected ids within 0..258; found 600" in rejects[1]["reason"]


def test_nothing_captured_is_code_1(run, llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"foo": 1}])
    code, out, _ = run(*common(llama, data, tmp_path))
    assert code == 1
    assert "0 captured, 1 rejected" in out
    assert len(CapturedDataset(tmp_path / "out")) == 0


def test_the_head_turns_stored_rows_into_the_models_logits(run, llama: Path, data: Path, tmp_path: Path) -> None:
    assert run(*common(llama, data, tmp_path), "--head", "--quiet")[0] == 0
    head, item = load_head(tmp_path / "out/head"), CapturedDataset(tmp_path / "out")[3]
    model = AutoModelForCausalLM.from_pretrained(llama).eval()
    with torch.no_grad():
        logits = model(item["input_ids"][None], use_cache=False).logits[0]
    torch.testing.assert_close(head.lm_head(head.norm(item["pre_norm"])), logits, rtol=1e-4, atol=1e-5)


def test_without_head_none_is_written(run, llama: Path, data: Path, tmp_path: Path) -> None:
    assert run(*common(llama, data, tmp_path), "--quiet")[0] == 0
    assert not (tmp_path / "out/head").exists()


def test_quiet_says_nothing(run, llama: Path, data: Path, tmp_path: Path) -> None:
    assert run(*common(llama, data, tmp_path), "--quiet") == (0, "", "")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--temperature", "-1"], "temperature must be a number >= 0"),
        (["--top-p", "0"], "top_p must be a number in (0, 1]"),
        (["--layer-ids", ""], "DSPARK requires at least one target layer for aux hidden capture."),
        (["--layer-ids", "9"], "outside the decoder range: [9]; num_hidden_layers=4."),
        (["--max-new-tokens", "0"], "Invalid value"),
        (["--stop", ""], "stop must be a sequence of non-empty strings"),
    ],
    ids=str,
)
def test_wrong_use_is_one_clear_line_and_code_2(
    run, llama: Path, data: Path, tmp_path: Path, flags: list[str], text: str
) -> None:
    code, out, err = run(*common(llama, data, tmp_path), *flags)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert text in err


def test_without_layer_ids_it_is_refused(run, llama: Path, data: Path, tmp_path: Path) -> None:
    code, _, err = run("--model", llama, "--data", data, "--out", tmp_path / "out")
    text = (
        "hiddentap: DSPARK requires explicit layer_ids for aux hidden capture. Name them by ids (--layer-ids), an algorithm "
        "(--algorithm) or a draft config (--draft-config).\n"
    )
    assert (code, err) == (2, text)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"--out": "mine"}, "mine is not empty"),
        ({"--out": "prompts.jsonl"}, "prompts.jsonl is a file"),
        ({"--layer-ids": "0,9"}, "[9]; num_hidden_layers=4"),
        ({"--data": "nothing.jsonl"}, "nothing.jsonl"),
        ({"--adapter": "nonsense"}, "unknown adapter 'nonsense'"),
    ],
    ids=str,
)
def test_what_needs_no_weights_is_checked_before_they_are_read(
    run, llama: Path, data: Path, tmp_path: Path, given: dict[str, str], text: str
) -> None:
    without_weights = Path(shutil.copytree(llama, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes").write_text("x")
    options = {"--model": without_weights, "--data": data, "--layer-ids": "1", "--out": "out"} | given
    places = {name: tmp_path / value for name, value in options.items() if name in ("--data", "--out")}
    code, out, err = run(*(part for pair in (options | places).items() for part in pair))
    assert (code in (1, 2), out, len(err.splitlines())) == (True, "", 1)
    assert text in err
    assert "model.safetensors" not in err
    assert not (tmp_path / "out").exists()


def test_a_model_that_cannot_be_run_so_is_refused_by_name(run, data: Path, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "mamba", build("mamba", vocab_size=259, pad_token_id=None))
    arguments = ["--model", folder, "--data", data, "--layer-ids", 1, "--max-new-tokens", 2]
    code, _, err = run(*arguments, "--out", tmp_path / "a", "--prefill-chunk", 3)
    assert code == 2
    assert "MambaForCausalLM run in chunks of several tokens does not give" in err
    assert run(*arguments, "--out", tmp_path / "b", "--quiet")[0] == 0


def test_a_signal_ends_it_with_its_code_and_leaves_sealed_shards(
    run, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hiddentap.capture.store import GrowingShardWriter, Shard

    seal = GrowingShardWriter.seal

    def seal_and_signal(writer: GrowingShardWriter) -> Shard:
        monkeypatch.setattr(GrowingShardWriter, "seal", seal)  # a second one would end the process as usual
        sealed = seal(writer)
        signal.raise_signal(signal.SIGTERM)
        return sealed

    monkeypatch.setattr(GrowingShardWriter, "seal", seal_and_signal)
    data = write_rows(tmp_path / "rows.jsonl", [{"text": "Once upon a time"}] * 6)
    code, out, err = run(*common(llama, data, tmp_path), "--shard-rows", 10, "--max-batch", 2)
    assert (code, out) == (143, "")
    assert "stopped; sealed shards stay in" in err
    assert 1 <= len(CapturedDataset(tmp_path / "out", allow_incomplete=True)) <= 3


def test_every_answer_says_how_it_ended_and_the_summary_which_tokens_end_one(
    run, llama: Path, data: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llama)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    out = tmp_path / "out"
    code, said, _ = run(
        "--model", llama, "--data", data, "--layer-ids", "0", "--out", out, "--max-new-tokens", 1, "--temperature", 0
    )
    assert code == 0
    assert f"{end} (chat template)" in said
    dataset = CapturedDataset(out)
    assert [dataset[i]["finish_reason"] for i in range(4)] == ["length"] * 4
    assert dataset.metadata["end_tokens"]["chat template"] == [end]
    model = AutoModelForCausalLM.from_pretrained(llama)
    stop = greedy(model, [60, 61, 62], 1)[0]
    again = tmp_path / "again"
    run(
        *common(llama, data, tmp_path)[:-5],
        "--layer-ids",
        0,
        "--out",
        again,
        "--temperature",
        0,
        "--stop-token-id",
        stop,
    )
    items = {item["sample_id"]: item for item in map(CapturedDataset(again).__getitem__, range(4))}
    assert items["ids"]["finish_reason"] == "stop_token"
    assert "finish_reasons" not in items["ids"]
    assert CapturedDataset.collate([items["ids"], items["text"]])["finish_reason"][0] == "stop_token"


def test_the_share_of_the_probability_that_top_logits_hold_is_said(
    run, llama: Path, data: Path, tmp_path: Path
) -> None:
    code, said, _ = run(*common(llama, data, tmp_path), "--top-logits", 3)
    assert code == 0
    model, dataset = AutoModelForCausalLM.from_pretrained(llama).eval(), CapturedDataset(tmp_path / "out")
    kept = []
    for i in range(len(dataset)):
        item = dataset[i]
        logits = PlainForward(model, item["input_ids"].tolist()).logits
        kept.append(logits.softmax(-1).topk(3).values.sum(-1)[item["output_ids"] >= 0])
    share = float(torch.cat(kept).mean())
    assert f"top logits  hold {share:.1%} of the probability, on average" in said


def test_quiet_that_ends_with_1_says_why_in_one_line(run, llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"foo": 1}])
    code, out, err = run(*common(llama, data, tmp_path), "--quiet")
    assert (code, out) == (1, "")
    assert (
        err
        == f"hiddentap: nothing was captured: all 1 input rows were rejected; see {tmp_path / 'out/rejects.jsonl'}\n"
    )


def test_a_device_that_is_not_there_is_refused_in_one_line_before_the_model_is_read(
    run, data: Path, tmp_path: Path
) -> None:
    for device in ("cuda:7", "mps:3", "xpu"):
        code, out, err = run(
            "--model",
            tmp_path / "nowhere",
            "--data",
            data,
            "--layer-ids",
            1,
            "--out",
            tmp_path / "out",
            "--device",
            device,
        )
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert f"there is no device {device!r} here" in err
        assert not (tmp_path / "out").exists()


def test_a_full_disk_says_that_a_generation_resumes(run, llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"text": "Once upon a time " * 8}] * 8)
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
    try:
        code, _, err = run(*common(llama, data, tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert code == 1
    assert "no room for shard-000000.safetensors" in err
    assert "Finish it by running it again." in err
    code, out, _ = run(*common(llama, data, tmp_path))
    assert code == 0
    assert "8 captured" in out
