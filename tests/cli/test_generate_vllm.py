"""`hiddentap generate --engine vllm`, beside a package that stands in for vLLM."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from hiddentap import CapturedDataset
from support import fake_vllm
from support.generation import PlainForward, greedy, row_error
from support.model_folder import CHATS, llama_folder, write_rows


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def run(run: Callable[..., tuple[int, str, str]], llama: Path, tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """`hiddentap generate --engine vllm`: (exit code, standard output, standard error)."""
    data = write_rows(tmp_path / "rows.jsonl", [*CHATS, {"id": "ids", "input_ids": [60, 61, 62]}])
    common = ("generate", "--model", llama, "--data", data, "--layer-ids", "0,2", "--engine", "vllm")
    return partial(run, *common, "--max-new-tokens", 6, "--out")


def tokens_of(out: Path) -> list[list[int]]:
    dataset = CapturedDataset(out)
    return [dataset[i]["input_ids"].tolist() for i in range(len(dataset))]


@pytest.mark.parametrize("turns", ["last", "all"])
def test_greedy_answers_and_rows_are_those_of_the_other_engine(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: str
) -> None:
    fake_vllm.install(monkeypatch)
    code, out, _ = run(tmp_path / "vllm", "--temperature", 0, "--turns", turns)
    assert code == 0
    assert "6 captured, 0 rejected" in out
    run(tmp_path / "hf", "--engine", "hf", "--temperature", 0, "--turns", "all")
    assert tokens_of(tmp_path / "vllm") == tokens_of(tmp_path / "hf")
    assert CapturedDataset(tmp_path / "vllm").metadata["generated"]["engine"] == "vllm"


def test_rows_are_those_of_a_plain_forward_over_what_was_generated(
    run, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = fake_vllm.install(monkeypatch).opened
    run(tmp_path / "out", "--temperature", 0, "--ignore-eos")
    model, dataset = AutoModelForCausalLM.from_pretrained(llama), CapturedDataset(tmp_path / "out")
    item = dataset[dataset.index_of("ids")]
    assert item["input_ids"].tolist() == [60, 61, 62, *greedy(model, [60, 61, 62], 6)]
    assert item["loss_mask"].tolist() == [0] * 3 + [1] * 6
    assert row_error(item["aux_hidden_states"], PlainForward(model, item["input_ids"].tolist()).layers([0, 2])) < 1e-5
    assert [llm.closed for llm in opened] == [True]


def test_an_answer_ends_at_every_end_mark_and_says_which(
    run, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_vllm.install(monkeypatch)
    end = greedy(AutoModelForCausalLM.from_pretrained(llama), [60, 61, 62], 3)[-1]
    run(tmp_path / "out", "--temperature", 0, "--ignore-eos", "--stop-token-id", end)
    found = map(json.loads, (tmp_path / "out/answers/answers-000000.jsonl").read_text().splitlines())
    (turn,) = next(line for line in found if line["id"] == "ids")["turns"]
    assert (turn["finish_reason"], turn["end_token"]) == ("stop_token", end)


def test_the_sampling_is_told_in_its_words(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch)
    asked: list[Any] = []
    answer = fake_vllm.LLM._answer

    def noted(llm: fake_vllm.LLM, prompt: list[int], params: Any) -> Any:
        asked.append(params)
        return answer(llm, prompt, params)

    monkeypatch.setattr(fake_vllm.LLM, "_answer", noted)
    run(
        tmp_path / "out",
        "--temperature",
        0.7,
        "--top-p",
        0.9,
        "--top-k",
        8,
        "--seed",
        11,
        "--engine-option",
        "max_num_seqs=4",
    )
    assert [(one.temperature, one.top_p, one.top_k, one.max_tokens) for one in asked] == [(0.7, 0.9, 8, 6)] * 6
    assert [one.seed for one in asked] == [11, 12, 13, 14, 15, 16]
    assert all(one.ignore_eos and one.stop_token_ids for one in asked)
    assert fake_vllm.LLM.faults.opened[0].arguments["max_num_seqs"] == 4


@pytest.mark.parametrize(
    ("faults", "told"),
    [
        ({"fail": "out of blocks"}, "vLLM failed in a batch of 6 prompts: out of blocks."),
        ({"change_token": True}, "expected vLLM to answer prompt a"),
    ],
    ids=["fails", "answers another"],
)
def test_what_goes_wrong_in_it_is_said(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: dict[str, Any], told: str
) -> None:
    fake_vllm.install(monkeypatch, **faults)
    code, _, err = run(tmp_path / "out")
    assert code == 1
    assert told in err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--max-batch", 4), "vLLM makes its own batches"),
        (("--device", "cpu"), "--device: vLLM takes the devices that it was built for"),
        (("--engine-option", "dtype=float16"), "engine options dtype are set by the run itself"),
        (("--logprobs",), "the rows come from a forward over the finished samples"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_it_cannot_do_is_refused_before_it_is_opened(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[Any, ...], told: str
) -> None:
    opened = fake_vllm.install(monkeypatch).opened
    code, _, err = run(tmp_path / "out", *flags)
    assert code == 2
    assert told in err
    assert opened == []
