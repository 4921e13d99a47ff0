"""`hiddentap generate --turns all`: every assistant turn anew, and the rows of the finished conversations."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from hiddentap import CapturedDataset
from hiddentap.capture.store import Manifest
from support.generation import PlainForward, greedy, row_error
from support.model_folder import llama_folder, write_rows

NEW = 6


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def bot(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


SYSTEM, RESULT = {"role": "system", "content": "Be brief."}, {"role": "tool", "content": "nine"}
ROWS: list[dict[str, Any]] = [
    {"id": "two", "messages": [SYSTEM, user("Hi?"), bot("old one"), user("More?"), bot("old two")]},
    {"id": "open", "messages": [user("Hm"), bot("Yes?"), user("And?")]},
    {"id": "tool", "messages": [user("W?"), bot("call"), RESULT, bot("It is 9."), user("ok"), bot("bye")]},
    {"id": "marked", "messages": [user("Hm"), bot("Yes?", weight=0), user("And?"), bot("So.")]},
    {"id": "text", "text": "Once upon a time"},
    {"id": "ids", "input_ids": [60, 61, 62]},
    {"foo": 1},
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", ROWS)


@pytest.fixture
def run(run: Callable[..., tuple[int, str, str]], llama: Path, data: Path) -> Callable[..., tuple[int, str, str]]:
    """`hiddentap generate --turns all`: (exit code, standard output, standard error)."""
    common = ("generate", "--model", llama, "--data", data, "--layer-ids", "0,2", "--turns", "all")
    return partial(run, *common, "--max-new-tokens", NEW, "--out")


def lines(path: Path) -> dict[str, dict[str, Any]]:
    return {line["id"]: line for line in map(json.loads, path.read_text().splitlines())}


def samples(out: Path) -> dict[str, dict[str, Any]]:
    dataset = CapturedDataset(out)
    return {dataset[i]["sample_id"]: dataset[i] for i in range(len(dataset))}


class ByHand:
    """What a chat server answers, turn after turn, and its greedy tokens of each."""

    def __init__(self, llama: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(llama)
        self._tokenizer = AutoTokenizer.from_pretrained(llama)

    def prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        return list(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])

    def answer(self, messages: list[dict[str, Any]]) -> tuple[list[int], dict[str, Any]]:
        tokens = greedy(self._model, self.prompt(messages), NEW)
        return tokens, bot(self._tokenizer.decode(tokens))

    def endings(self, *questions: str) -> list[tuple[str, int | None, int]]:
        """Why each answer of generate() ended, by which of the model's own end tokens, and how many tokens it has."""
        messages, found = [], []
        for question in questions:
            messages.append(user(question))
            ids = torch.tensor([self.prompt(messages)])
            # Without --ignore-eos the end mark of the chat template, id 1, ends an answer too.
            ends = [1, *self._model.generation_config.eos_token_id]
            output = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, eos_token_id=ends, pad_token_id=0
            )  # fmt: skip
            tokens = output[0, ids.shape[1] :].tolist()
            ended = tokens[-1] in ends
            found.append(("stop_token" if ended else "length", tokens[-1] if ended else None, len(tokens)))
            messages.append(bot(self._tokenizer.decode(tokens[:-1] if ended else tokens)))
        return found


def test_every_turn_is_answered_behind_the_new_ones_before_it(run, llama: Path, tmp_path: Path) -> None:
    code, out, _ = run(tmp_path / "out", "--temperature", 0, "--ignore-eos")
    assert code == 0
    assert "6 captured, 1 rejected" in out
    assert "10 written anew" in out
    assert "1 that a tool's result follows" in out
    hand, messages = ByHand(llama), [SYSTEM, user("Hi?")]
    _, first = hand.answer(messages)
    messages += [first, user("More?")]
    tokens, second = hand.answer(messages)
    found = samples(tmp_path / "out")["two"]
    assert found["input_ids"].tolist() == hand.prompt(messages) + tokens
    assert lines(tmp_path / "out/answers/messages.jsonl")["two"]["messages"] == [*messages, second]


def test_a_turn_whose_call_a_tool_answers_stays_as_it_is(run, llama: Path, tmp_path: Path) -> None:
    run(tmp_path / "out", "--temperature", 0, "--ignore-eos")
    told = lines(tmp_path / "out/answers/messages.jsonl")["tool"]["messages"]
    assert told[:3] == [user("W?"), bot("call"), RESULT]
    hand = ByHand(llama)
    assert told[3] == hand.answer(told[:3])[1]
    assert told[5] == hand.answer(told[:5])[1]
    piece = lines(tmp_path / "out/answers/answers-000000.jsonl")["tool"]
    assert [turn["message"] for turn in piece["turns"]] == [3, 5]


def test_a_conversation_that_ends_with_a_question_is_answered_too(run, tmp_path: Path) -> None:
    run(tmp_path / "out", "--temperature", 0, "--ignore-eos")
    told = lines(tmp_path / "out/answers/messages.jsonl")["open"]["messages"]
    assert [message["role"] for message in told] == ["user", "assistant", "user", "assistant"]


def test_texts_and_ids_go_on_from_where_they_end(run, llama: Path, tmp_path: Path) -> None:
    run(tmp_path / "out", "--temperature", 0, "--ignore-eos")
    model = AutoModelForCausalLM.from_pretrained(llama)
    found = samples(tmp_path / "out")["ids"]
    assert found["input_ids"].tolist() == [60, 61, 62, *greedy(model, [60, 61, 62], NEW)]
    assert found["loss_mask"].tolist() == [0] * 3 + [1] * NEW


def test_rows_are_those_of_a_plain_forward_over_the_finished_sample_each_token_once(
    run, llama: Path, data: Path, tmp_path: Path
) -> None:
    run(tmp_path / "out", "--seed", 4)
    model, found = AutoModelForCausalLM.from_pretrained(llama), samples(tmp_path / "out")
    pieces = lines(tmp_path / "out/answers/answers-000000.jsonl")
    assert set(found) == {"two", "open", "tool", "marked", "text", "ids"}
    for name, item in found.items():
        assert item["input_ids"].tolist() == pieces[name]["input_ids"]
        assert item["loss_mask"].tolist() == pieces[name]["loss_mask"]
        plain = PlainForward(model, item["input_ids"].tolist())
        assert row_error(item["aux_hidden_states"], plain.layers([0, 2])) < 1e-5
    assert [found[name]["line"] for name in ("two", "ids")] == [1, 6]
    assert found["two"]["source"] == str(data)


def test_a_mark_of_the_record_leaves_a_new_turn_out_of_the_mask(run, tmp_path: Path) -> None:
    run(tmp_path / "out", "--seed", 4, "--ignore-eos")
    piece = lines(tmp_path / "out/answers/answers-000000.jsonl")["marked"]
    assert [turn["supervised"] for turn in piece["turns"]] == [0, NEW]
    assert piece["loss_mask"] == [0] * (len(piece["input_ids"]) - NEW) + [1] * NEW


def test_a_header_says_how_the_turns_were_written(run, llama: Path, tmp_path: Path) -> None:
    run(tmp_path / "out", "--seed", 4, "--top-p", 0.9)
    about = CapturedDataset(tmp_path / "out").metadata
    end = AutoTokenizer.from_pretrained(llama).convert_tokens_to_ids("<|im_end|>")
    assert about["generated"]["turns"] == "all"
    assert about["generated"]["engine"] == "hf"
    assert about["generated"]["seed"] == 4
    assert about["generated"]["sampling"]["top_p"] == 0.9
    assert about["generated"]["end_tokens"]["chat template"] == [end]
    assert about["mask_rules"] == {"generated": 6}


def test_every_turn_says_why_it_ended_and_by_which_mark(run, llama: Path, tmp_path: Path) -> None:
    run(tmp_path / "out", "--temperature", 0, "--ignore-eos")
    first = lines(tmp_path / "out/answers/answers-000000.jsonl")["two"]["input_ids"][-NEW + 1]
    run(tmp_path / "ended", "--temperature", 0, "--ignore-eos", "--stop-token-id", first)
    turn = lines(tmp_path / "ended/answers/answers-000000.jsonl")["two"]["turns"][-1]
    assert (turn["finish_reason"], turn["end_token"]) == ("stop_token", first)
    cut = lines(tmp_path / "out/answers/answers-000000.jsonl")["two"]["turns"][-1]
    assert cut == {"message": 4, "finish_reason": "length", "end_token": None, "tokens": NEW, "supervised": NEW}


def test_reasons_are_those_of_the_models_own_generate_for_each_turn_and_inspect_counts_them(
    run, llama: Path, data: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(llama, tmp_path / "model")
    config = GenerationConfig.from_pretrained(model, eos_token_id=[28, 56])
    config.save_pretrained(model)
    # The first answer ends by a mark that is its last allowed token, the second is cut.
    expected = {
        "both": [("stop_token", 28, 6), ("length", None, 6)],
        "short": [("stop_token", 56, 4), ("stop_token", 56, 2)],
    }
    asked = {"both": ("Hi?", "More?"), "short": ("Name a river.", "Why?")}
    hand = ByHand(model)
    assert {name: hand.endings(*questions) for name, questions in asked.items()} == expected
    rows = {name: [user(first), bot("old"), user(second), bot("old")] for name, (first, second) in asked.items()}
    write_rows(data, [{"id": name, "messages": messages} for name, messages in rows.items()])
    out = tmp_path / "out"
    _, told, _ = run(out, "--model", model, "--temperature", 0)
    pieces = lines(out / "answers/answers-000000.jsonl")
    found = {name: [(t["finish_reason"], t["end_token"], t["tokens"]) for t in pieces[name]["turns"]] for name in asked}
    assert found == expected
    command = run.func  # the command itself
    assert "1 length, 3 stop_token\n" in told
    assert "1 length, 3 stop_token\n" in command("inspect", out)[1]
    assert json.loads(command("inspect", out, "--json")[1])["finish_reasons"] == {"stop_token": 3, "length": 1}


def test_samples_of_which_a_turn_ended_by_length_can_be_left_out(run, tmp_path: Path) -> None:
    code, _, err = run(tmp_path / "out", "--temperature", 0, "--ignore-eos", "--drop-truncated")
    assert code == 1
    assert "nothing was captured" in err
    rejects = lines(tmp_path / "out/rejects.jsonl")
    assert rejects["two"]["reason"] == f"the answer in message 2 ended by length, after {NEW} tokens"
    assert rejects["two"]["detail"]["code"] == "length"
    assert Manifest.read(tmp_path / "out/manifest.json").counts["rejected_by_code"] == {
        "length": 6,
        "no_known_field": 1,
    }


def test_a_conversation_that_became_too_long_ends_with_its_last_answer(run, data: Path, tmp_path: Path) -> None:
    write_rows(data, [{"id": "long", "messages": [user("Hi?"), bot("old"), user("x" * 300), bot("older")]}])
    code, out, _ = run(tmp_path / "out", "--seed", 1)
    assert code == 0
    assert "1 behind conversations that had become too long" in out
    told = lines(tmp_path / "out/answers/messages.jsonl")["long"]["messages"]
    assert [message["role"] for message in told] == ["user", "assistant"]


def test_a_field_that_nothing_read_is_said(run, data: Path, tmp_path: Path) -> None:
    write_rows(data, [{"id": "a", "messages": [user("Hi?"), bot("old")], "colour": "red"}])
    _, out, _ = run(tmp_path / "out", "--seed", 1)
    assert "field 'colour' of 1 rows" in out


@pytest.mark.parametrize("flag", ["--sampling-mask", "--logprobs"])
def test_what_only_steps_can_record_is_refused(run, tmp_path: Path, flag: str) -> None:
    code, _, err = run(tmp_path / "out", flag)
    assert code == 2
    assert "the rows come from a forward over the finished samples" in err
    assert not (tmp_path / "out").exists()


def test_top_logits_are_those_of_the_forward(run, llama: Path, tmp_path: Path) -> None:
    run(tmp_path / "out", "--seed", 1, "--top-logits", 3)
    item, model = samples(tmp_path / "out")["two"], AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        expected = model(item["input_ids"][None]).logits[0].topk(3).values
    torch.testing.assert_close(item["topk_logits"], expected, rtol=1e-4, atol=1e-4)


def tree(out: Path) -> dict[str, bytes]:
    files = (path for path in out.rglob("*") if path.is_file() and path.name != ".hiddentap-lock")
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


def test_a_regeneration_that_is_over_is_left_as_it_is(run, tmp_path: Path) -> None:
    run(tmp_path / "out", "--seed", 3)
    before = tree(tmp_path / "out")
    assert run(tmp_path / "out", "--seed", 3)[0] == 0
    assert tree(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (("--seed", 4), "sampling.seed: 3 -> 4"),
        (("--turns", "last", "--engine", "hf"), "is not empty; a generation needs"),
        (("--max-batch", 3), "steps.max_batch: 16 -> 3"),
        (("--drop-truncated",), "drop_truncated: false -> true"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_other_settings_than_those_it_began_with_are_refused_by_name(
    run, tmp_path: Path, changed: tuple[Any, ...], named: str
) -> None:
    run(tmp_path / "out", "--seed", 3)
    before = tree(tmp_path / "out")
    code, _, err = run(tmp_path / "out", "--seed", 3, *changed)
    assert code == 2
    assert named in err
    assert tree(tmp_path / "out") == before


def test_a_plain_capture_does_not_go_on_with_a_folder_of_new_turns(
    run, llama: Path, data: Path, tmp_path: Path
) -> None:
    run(tmp_path / "out", "--seed", 3)
    capture = run.func  # the command itself
    code, _, err = capture("capture", "--model", llama, "--data", data, "--layer-ids", "0,2", "--out", tmp_path / "out")
    assert code == 2
    assert "holds another run" in err
    assert "generated" in err
