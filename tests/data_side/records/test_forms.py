"""Rows as other tools document them: read to the same ids and masks, or rejected by name.

Ids by hand: the three special tokens are 0 to 2, a printable ASCII byte b is b - 30, a newline 201, a space 223.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from support.rows import reject_of, sample_of, supervised_texts, text_of, turns
from support.templates import CHATML, MARKED, TOOLS, byte_tokenizer

USER, ASSISTANT = [0, 87, 85, 71, 84, 201], [0, 67, 85, 85, 75, 85, 86, 67, 80, 86, 201]
SYSTEM = [0, 85, 91, 85, 86, 71, 79, 201]
# user: a, assistant: yo
CHAT = [*USER, 67, 1, 201, *ASSISTANT, 91, 81, 1, 201]
CHAT_MASK = [0] * 20 + [1, 1, 1, 0]
ASKED, ANSWERED = {"role": "user", "content": "a"}, {"role": "assistant", "content": "yo"}

SAME_CHAT: dict[str, dict[str, Any]] = {
    "TRL and OpenAI messages": {"messages": [ASKED, ANSWERED]},
    "OpenAI with weights": {"messages": [ASKED, {**ANSWERED, "weight": 1}], "parallel_tool_calls": False},
    "ms-swift": {"messages": [ASKED, {**ANSWERED, "loss": True}]},
    "ms-swift query": {"query": "a", "response": "yo", "history": []},
    "axolotl": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "yo", "train": True}]},
    "LLaMA-Factory ShareGPT": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "yo"}], "tools": ""},
    "LLaMA-Factory alpaca": {"instruction": "a", "input": "", "output": "yo", "system": "", "history": []},
    "Stanford alpaca": {"instruction": "a", "output": "yo"},
    "TRL prompt and completion": {"prompt": [ASKED], "completion": [ANSWERED]},
    "prompt of messages, completion of text": {"prompt": [ASKED], "completion": "yo"},
    "OpenAI batch": {"custom_id": "c", "method": "POST", "url": "/v1", "body": {"model": "m", "messages": [ASKED, ANSWERED]}},
    "SpecForge": {"id": "c", "conversations": [ASKED, ANSWERED]},
    "NeMo": {"mask": "User", "conversations": [{"from": "User", "value": "a"}, {"from": "Assistant", "value": "yo"}]},
    "a mask over messages": {"messages": [ASKED, ANSWERED], "loss_mask": [0, 1]},
    "a mask over tokens": {"messages": [ASKED, ANSWERED], "loss_mask": CHAT_MASK},
    "ids with a mask": {"input_ids": CHAT, "loss_mask": CHAT_MASK},
    "ids with labels": {"input_ids": CHAT, "labels": [-100] * 20 + [91, 81, 1, -100], "attention_mask": [1] * 24},
    "TRL's masks": {"input_ids": CHAT, "assistant_masks": CHAT_MASK, "completion_mask": [0] * 9 + [1] * 15},
    "padded on both sides": {
        "input_ids": [2, 2, *CHAT, 2], "labels": [-100] * 22 + [91, 81, 1, -100, -100],
        "attention_mask": [0, 0, *[1] * 24, 0], "position_ids": [0, 0, *range(24), 0], "token_type_ids": [0] * 27,
    },
}  # fmt: skip


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    return byte_tokenizer(tmp_path / "tokenizer", CHATML)


@pytest.mark.parametrize("row", SAME_CHAT.values(), ids=SAME_CHAT.keys())
def test_the_same_conversation_in_any_form_has_the_same_ids_and_mask(
    tmp_path: Path, tokenizer: str, row: dict[str, Any]
) -> None:
    sample = sample_of(tmp_path, tokenizer, row, strict=True)
    assert sample.input_ids.tolist() == CHAT
    assert sample.loss_mask.tolist() == CHAT_MASK


REJECTED: dict[str, tuple[dict[str, Any], str, str]] = {
    "labels shifted by one": (
        {"input_ids": [67, 91, 81], "labels": [-100, 81, 81]}, "bad_labels", "found 81 at token 1, which is 91",
    ),
    "short labels": ({"input_ids": [67, 91], "labels": [-100]}, "bad_labels", r"as long as input_ids \(2\); found 1"),
    "labels of text": ({"input_ids": [67], "labels": "a"}, "bad_labels", "a list of integers"),
    "a hole in the attention": (
        {"input_ids": [67, 91, 81], "attention_mask": [1, 0, 1]}, "bad_attention_mask", "found one at token 1",
    ),
    "no attention": ({"input_ids": [67], "attention_mask": [0]}, "empty", "found zeros alone"),
    "packed samples": (
        {"input_ids": [67, 91, 81], "position_ids": [0, 1, 0]}, "bad_position_ids", "found 0 at token 2; give a packed row",
    ),
    "masks that disagree": (
        {"input_ids": [67, 91], "labels": [-100, 91], "loss_mask": [1, 1]}, "masks_disagree", "differ at token 0",
    ),
    "an assistant mask of twos": ({"input_ids": [67], "assistant_masks": [2]}, "bad_assistant_masks", "0 and 1"),
    "a short completion mask": ({"input_ids": [67, 67], "completion_mask": [1]}, "bad_completion_mask", "found 1"),
    "labels beside text": ({"text": "a", "labels": [67]}, "unread_field", "found 'labels', which nothing reads here"),
    "a mask beside text": ({"text": "a", "loss_mask": [1]}, "unread_field", "'loss_mask'"),
    "token weights": ({"input_ids": [67], "loss_weights": [0.5]}, "unread_field", "'loss_weights'"),
    "axolotl's detail": (
        {"messages": [ASKED, {**ANSWERED, "train_detail": [{"begin_offset": 0}]}]}, "unread_field", "'messages.train_detail'",
    ),
    "LLaVA's image": ({"image": "a.jpg", "conversations": [ASKED, ANSWERED]}, "unread_field", "'image'"),
    "LLaMA-Factory's images": ({"images": ["a.jpg"], "messages": [ASKED, ANSWERED]}, "unread_field", "'images'"),
    "a fraction for a weight": ({"messages": [ASKED, {**ANSWERED, "weight": 0.5}]}, "bad_mark", "message 1 to be 0 or 1.*'0.5'"),
    "text for a mark": ({"messages": [ASKED, {**ANSWERED, "train": "no"}]}, "bad_mark", "'no'"),
    "marks that disagree": ({"messages": [ASKED, {**ANSWERED, "loss": 1, "weight": 0}]}, "masks_disagree", "message 1"),
    "a trained question": (
        {"messages": [{**ASKED, "train": True}, ANSWERED]}, "bad_mark", "found 1 for message 0, of role user; supervise every",
    ),
    "a mask of another length": (
        {"messages": [ASKED, ANSWERED], "loss_mask": [0, 1, 1]}, "bad_loss_mask", r"\(2\) or their tokens \(24\); found 3",
    ),
    "every turn left out": ({"messages": [ASKED, {**ANSWERED, "weight": 0}]}, "unsupervised", "found none"),
    "NeMo's mask of the assistant": ({"messages": [ASKED, ANSWERED], "mask": "Assistant"}, "bad_mask", "found another"),
    "two system texts": (
        {"system": "A", "messages": [{"role": "system", "content": "B"}, ASKED, ANSWERED]}, "two_systems", "found another one",
    ),
    "a system of numbers": ({"system": 7, "messages": [ASKED, ANSWERED]}, "bad_system", "found a int"),
    "a prompt alone": ({"prompt": "a"}, "unsupervised", "found none"),
    "a prompt of numbers": ({"prompt": 7, "completion": "a"}, "bad_message", "texts or lists of messages"),
    "a preference": ({"chosen": [ASKED, ANSWERED], "rejected": []}, "preference", "found a preference pair .'chosen', 'rej"),
    "a prompt and a preference": (
        {"prompt": "a", "chosen": "b", "rejected": "c"}, "preference", "give the chosen one as messages, or as completion",
    ),
    "messages and a preference": (
        {"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [ANSWERED]}, "preference", "found a preference pair",
    ),
    "a preference of alpaca": ({"instruction": "a", "chosen": "b", "rejected": "c"}, "preference", "a preference pair"),
    "an undesirable answer": ({"prompt": "a", "completion": "b", "label": False}, "preference", "an undesirable one"),
    "answers of a batch": ({"custom_id": "c", "response": {"body": {}}}, "no_known_field", "join them with the messages"),
    "a body of text": ({"title": "t", "body": "b"}, "no_known_field", "found 'title', 'body'"),
    "an instruction of numbers": ({"instruction": 7, "output": "yo"}, "bad_text", "to be strings"),
    "a history of texts": ({"instruction": "a", "output": "yo", "history": ["b"]}, "bad_message", "history to be pairs"),
    "a reserved argument": (
        {"messages": [ASKED, ANSWERED], "chat_template_kwargs": {"tools": []}}, "bad_chat_template_kwargs", "found 'tools'",
    ),
    "arguments of text": (
        {"messages": [ASKED, ANSWERED], "chat_template_kwargs": [1]}, "bad_chat_template_kwargs", "found a list",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("row", "code", "reason"), REJECTED.values(), ids=REJECTED.keys())
def test_what_cannot_be_read_truly_is_rejected_by_name(
    tmp_path: Path, tokenizer: str, row: dict[str, Any], code: str, reason: str
) -> None:
    reject = reject_of(tmp_path, tokenizer, row)
    assert reject.code == code
    assert re.search(reason, reject.reason), reject.reason


@pytest.mark.parametrize(
    "row",
    [
        {"messages": turns("a", "yo"), "prompt": "a", "chosen": "yo", "rejected": "no"},
        {"prompt": "a", "completion": "yo", "label": True},
    ],
    ids=["an answer beside the pair", "a desirable answer"],
)
def test_a_row_that_names_its_answer_is_no_preference(tmp_path: Path, tokenizer: str, row: dict[str, Any]) -> None:
    assert sample_of(tmp_path, tokenizer, row).loss_mask.any()


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["substitution", "marks"])
@pytest.mark.parametrize(
    "mark", [{"weight": 0}, {"loss": False}, {"train": False}, {"trainable": 0.0}, {"loss_mask": 0}]
)
def test_a_mark_leaves_its_turn_out(tmp_path: Path, template: str, mark: dict[str, Any]) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", template)
    first, second = turns("a", "one", "b", "two")[1::2]
    row = {"messages": [ASKED, {**first, **mark}, ASKED, second]}
    assert supervised_texts(tokenizer, sample_of(tmp_path, tokenizer, row)) == ["two<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["substitution", "marks"])
def test_the_last_turn_alone_is_supervised_on_request(tmp_path: Path, template: str) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", template)
    row = {"messages": turns("a", "one", "b", "two", "c")}
    last = sample_of(tmp_path, tokenizer, row, loss_on="last")
    both = sample_of(tmp_path, tokenizer, row)
    assert supervised_texts(tokenizer, last) == ["two<|im_end|>"]
    assert supervised_texts(tokenizer, both) == ["one<|im_end|>", "two<|im_end|>"]
    assert last.input_ids.tolist() == both.input_ids.tolist()


def test_a_mark_takes_a_turn_out_of_a_mask_over_everything(tmp_path: Path, tokenizer: str) -> None:
    row = {"messages": [ASKED, {**ANSWERED, "weight": 0}]}
    assert sample_of(tmp_path, tokenizer, row, loss_on="all").loss_mask.tolist() == [1] * 20 + [0, 0, 0, 1]
    asked = {"messages": [{**ASKED, "weight": 0}, ANSWERED]}
    assert reject_of(tmp_path, tokenizer, asked, loss_on="all").code == "bad_mark"


def test_turns_of_a_prompt_are_not_supervised(tmp_path: Path, tokenizer: str) -> None:
    row = {"prompt": turns("a", "one", "b"), "completion": turns("two", first="assistant")}
    sample = sample_of(tmp_path, tokenizer, row)
    assert supervised_texts(tokenizer, sample) == ["two<|im_end|>"]


def test_a_prompt_and_completion_of_text_are_one_text_with_the_completion_supervised(
    tmp_path: Path, tokenizer: str
) -> None:
    row = {"prompt": "ab", "completion": " yo"}
    sample = sample_of(tmp_path, tokenizer, row)
    assert (sample.input_ids.tolist(), sample.loss_mask.tolist()) == ([67, 68, 223, 91, 81], [0, 0, 1, 1, 1])
    assert sample.mask_rule == "completion"
    assert sample_of(tmp_path, tokenizer, row, loss_on="all").loss_mask.tolist() == [1] * 5


@pytest.mark.parametrize("name", ["system", "system_prompt", "system_message"])
def test_a_system_text_beside_the_conversation_goes_ahead_of_it(tmp_path: Path, tokenizer: str, name: str) -> None:
    sample = sample_of(
        tmp_path, tokenizer, {name: "b", "messages": [ASKED, ANSWERED], "loss_mask": [0, 1]}, strict=True
    )
    assert sample.input_ids.tolist() == [*SYSTEM, 68, 1, 201, *CHAT]
    assert sample.loss_mask.tolist() == [0] * 11 + CHAT_MASK


def test_the_same_system_text_twice_is_rendered_once(tmp_path: Path, tokenizer: str) -> None:
    row = {"system": "b", "messages": [{"role": "system", "content": "b"}, ASKED, ANSWERED]}
    assert sample_of(tmp_path, tokenizer, row).input_ids.tolist() == [*SYSTEM, 68, 1, 201, *CHAT]


def test_alpacas_input_follows_its_instruction_and_its_history_precedes_both(tmp_path: Path, tokenizer: str) -> None:
    row = {"instruction": "do", "input": "this", "output": "yo", "system": "S", "history": [["q", "r"]]}
    assert text_of(tokenizer, sample_of(tmp_path, tokenizer, row)) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nr<|im_end|>\n"
        "<|im_start|>user\ndo\nthis<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
    )


def test_a_rows_own_template_arguments_go_before_the_runs(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", "{{ mood }}{{ tone }}|" + CHATML)
    row = {"messages": [ASKED, ANSWERED], "chat_template_kwargs": {"mood": "m"}}
    run = {"template_args": {"mood": "r", "tone": "t"}, "strict": True}
    assert text_of(tokenizer, sample_of(tmp_path, tokenizer, row, **run)).startswith("mt|<|im_start|>")
    del row["chat_template_kwargs"]
    assert text_of(tokenizer, sample_of(tmp_path, tokenizer, row, **run)).startswith("rt|<|im_start|>")


def test_functions_are_tools_and_a_batchs_tools_are_its_own(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", TOOLS)
    tool = {"type": "function", "function": {"name": "look"}}
    head = "<|im_start|>system\n" + json.dumps(tool) + "<|im_end|>"
    for row in (
        {"messages": [ASKED, ANSWERED], "functions": [{"name": "look"}]},
        {"custom_id": "c", "body": {"messages": [ASKED, ANSWERED], "tools": [tool]}},
    ):
        assert text_of(tokenizer, sample_of(tmp_path, tokenizer, row)).startswith(head)


def test_where_a_mask_came_from_is_told(tmp_path: Path, tokenizer: str) -> None:
    rules = {name: sample_of(tmp_path, tokenizer, row).mask_rule for name, row in SAME_CHAT.items()}
    assert rules["ids with labels"] == "labels"
    assert rules["TRL's masks"] == "assistant_masks+completion_mask"
    assert rules["ids with a mask"] == rules["a mask over tokens"] == "row"
    assert rules["a mask over messages"] == rules["OpenAI batch"] == "substitution"


def test_a_field_that_nothing_read_is_named(tmp_path: Path, tokenizer: str) -> None:
    messages = [ASKED, {**ANSWERED, "rating": 5}]
    row = {"id": "c", "messages": messages, "source": "web", "score": 0, "text": "t", "tags": [], "note": None}
    fields = sample_of(tmp_path, tokenizer, row, strict=True).fields
    assert fields.read == ("id", "messages")
    assert fields.unread == ("messages.rating", "score", "source", "text")


def test_a_field_of_a_message_that_the_template_names_counts_as_read(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(
        tmp_path / "t", CHATML.replace("message.role +", "message.role + (message.name or '') +")
    )
    row = {"messages": [{**ASKED, "name": "N"}, ANSWERED]}
    sample = sample_of(tmp_path, tokenizer, row)
    assert sample.fields.read == ("messages", "messages.name")
    assert text_of(tokenizer, sample).startswith("<|im_start|>userN\na")


@pytest.mark.parametrize(
    "row",
    [
        {"text": "a", "system": "s"},
        {"text": "a", "tools": [{"name": "look"}]},
        {"text": "a", "chat_template_kwargs": {"x": 1}},
        {"input_ids": [67], "system_prompt": "s"},
        {"text": "a", "attention_mask": [1]},
        {"messages": [ASKED, ANSWERED], "adapter": "lora"},
        {"messages": [ASKED, ANSWERED], "chat_template": "{{ x }}"},
        {"messages": [ASKED, ANSWERED], "weight": 0.5},
    ],
    ids=lambda row: list(row)[-1],
)
def test_a_field_that_says_how_a_row_is_meant_is_a_reject_of_a_strict_run(
    tmp_path: Path, tokenizer: str, row: dict[str, Any]
) -> None:
    assert list(row)[-1] in sample_of(tmp_path, tokenizer, row).fields.unread
    assert reject_of(tmp_path, tokenizer, row, strict=True).code == "unread_field"


def test_a_text_of_turns_is_one_more_form_of_the_conversation(tmp_path: Path, tokenizer: str) -> None:
    text = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
    sample = sample_of(tmp_path, tokenizer, {"text": text}, strict=True)
    assert (sample.input_ids.tolist(), sample.loss_mask.tolist()) == (CHAT, CHAT_MASK)
    assert sample.mask_rule == "text_turns"
