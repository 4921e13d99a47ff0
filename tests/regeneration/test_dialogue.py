"""What the answers to a record's turns make of it: prompts, messages, and a mask over what the model wrote alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hiddentap.capture.data import RecordEncoder, TokeniseOptions
from hiddentap.capture.data.chat.conversation import read_conversation
from hiddentap.capture.data.errors import RecordError
from hiddentap.capture.data.schema import Text
from hiddentap.capture.regeneration.dialogue import Dialogue
from hiddentap.capture.regeneration.engine import Answer
from hiddentap.capture.regeneration.written import WrittenSample
from support.templates import CHATML, MARKED, REWRITING, byte_tokenizer, merging_tokenizer

ASKED = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "old"},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "older"},
]
TRIMMING = CHATML.replace("message.content", "message.content | trim")


class Talk:
    """A dialogue whose answers are given as text, each token of it by itself or as the tokenizer makes them."""

    def __init__(self, folder: str, messages: list[dict[str, Any]], turns: str = "all") -> None:
        self.encoder = RecordEncoder(TokeniseOptions(tokenizer=folder))
        self.dialogue = Dialogue(read_conversation(messages), turns, self.encoder)  # type: ignore[arg-type]
        self.prompts: list[str] = []

    def answers(self, *texts: str, ids: Callable[[str], list[int]] | None = None) -> WrittenSample:
        """Answer every turn; a text without an end mark was cut."""
        encode = ids or (lambda text: self.encoder.tokenizer(text, add_special_tokens=False)["input_ids"])
        for text in texts:
            prompt = self.dialogue.next_prompt()
            assert prompt is not None
            self.prompts.append(self.encoder.tokenizer.decode(list(prompt)))
            ended = text.endswith("<|im_end|>")
            self.dialogue.take(prompt, Answer(tuple(encode(text)), "stop_token" if ended else "length"))
        assert self.dialogue.next_prompt() is None
        return self.dialogue.sample()

    def supervised(self, sample: WrittenSample) -> list[str]:
        """The stretches that the mask marks, as text."""
        stretches: list[list[int]] = [[]]
        for token, mark in zip(sample.input_ids, sample.loss_mask, strict=True):
            if mark:
                stretches[-1].append(token)
            elif stretches[-1]:
                stretches.append([])
        return [self.encoder.tokenizer.decode(ids) for ids in stretches if ids]


@pytest.mark.parametrize("template", [CHATML, TRIMMING], ids=["chatml", "trimming"])
def test_every_new_turn_is_supervised_with_the_end_mark_it_wrote(tmp_path: Path, template: str) -> None:
    talk = Talk(byte_tokenizer(tmp_path, template), ASKED)
    sample = talk.answers("First.<|im_end|>", "Second.<|im_end|>")
    assert talk.prompts == [
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\nFirst.<|im_end|>\n"
        "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n",
    ]
    assert talk.supervised(sample) == ["First.<|im_end|>", "Second.<|im_end|>"]
    assert talk.encoder.tokenizer.decode(sample.input_ids) == talk.prompts[1] + "Second.<|im_end|>"
    assert [turn["end_token"] for turn in sample.turns] == [1, 1]
    assert [turn["supervised"] for turn in sample.turns] == [7, 8]


def test_of_a_turn_whose_thinking_the_template_drops_the_rest_is_supervised(tmp_path: Path) -> None:
    talk = Talk(byte_tokenizer(tmp_path, REWRITING), ASKED)
    sample = talk.answers("<think>\nhm\n</think>\n\nFirst.<|im_end|>", "<think>\nso\n</think>\n\nSecond.<|im_end|>")
    assert talk.prompts[1] == (
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\nFirst.<|im_end|>\n"
        "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert talk.supervised(sample) == ["First.<|im_end|>", "<think>\nso\n</think>\n\nSecond.<|im_end|>"]
    assert sample.messages is not None
    assert sample.messages[1]["content"] == "<think>\nhm\n</think>\n\nFirst."
    assert [turn["supervised"] for turn in sample.turns] == [7, 29]
    assert [turn["tokens"] for turn in sample.turns] == [28, 29]


def test_the_end_mark_that_the_template_puts_behind_a_cut_answer_is_not_supervised(tmp_path: Path) -> None:
    talk = Talk(byte_tokenizer(tmp_path), ASKED)
    sample = talk.answers("Fir", "Sec")
    assert talk.prompts[1].startswith("<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\nFir<|im_end|>\n")
    assert talk.supervised(sample) == ["Fir", "Sec"]
    assert [turn["finish_reason"] for turn in sample.turns] == ["length", "length"]


def test_white_space_that_the_template_trims_costs_no_other_token(tmp_path: Path) -> None:
    talk = Talk(byte_tokenizer(tmp_path, TRIMMING), ASKED)
    assert talk.supervised(talk.answers("\n First. \n<|im_end|>", "Second.<|im_end|>")) == [
        "First.<|im_end|>",
        "Second.<|im_end|>",
    ]


def test_tokens_that_the_tokenizer_makes_otherwise_than_the_model_did_are_not_supervised(tmp_path: Path) -> None:
    folder = merging_tokenizer(tmp_path, CHATML, merges=[("t", "h")])
    talk = Talk(folder, ASKED)
    tokenizer = talk.encoder.tokenizer

    def apart(text: str) -> list[int]:
        body, _, mark = text.partition("<|im_end|>")
        end = [tokenizer.convert_tokens_to_ids("<|im_end|>")] if mark or text.endswith("<|im_end|>") else []
        return [tokenizer.convert_tokens_to_ids(letter) for letter in body] + [1] * bool(end or text.endswith(">"))

    sample = talk.answers("athb<|im_end|>", "cth<|im_end|>", ids=apart)
    assert talk.supervised(sample) == ["a", "b<|im_end|>", "cth<|im_end|>"]


def test_text_of_others_that_looks_like_an_answer_is_not_supervised(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Say First."}, *ASKED[1:]]
    talk = Talk(byte_tokenizer(tmp_path), messages)
    assert talk.supervised(talk.answers("First.<|im_end|>", "x<|im_end|>")) == ["First.<|im_end|>", "x<|im_end|>"]


def test_the_last_turn_alone_leaves_the_others_unsupervised(tmp_path: Path) -> None:
    talk = Talk(byte_tokenizer(tmp_path), ASKED, "last")
    sample = talk.answers("Second.<|im_end|>")
    assert talk.prompts[0].count("old") == 1
    assert talk.supervised(sample) == ["Second.<|im_end|>"]


def test_what_the_generation_prompt_writes_is_not_supervised(tmp_path: Path) -> None:
    template = CHATML.replace("'<|im_start|>assistant\\n' }}", "'<|im_start|>assistant\\n<think>\\n' }}")
    talk = Talk(byte_tokenizer(tmp_path, template), ASKED[:2])
    sample = talk.answers("hm</think>Yes.<|im_end|>")
    assert talk.supervised(sample) == ["hm</think>Yes.<|im_end|>"]


def test_marks_of_the_template_tell_the_turns_too(tmp_path: Path) -> None:
    template = MARKED + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    talk = Talk(byte_tokenizer(tmp_path, template), ASKED)
    assert talk.supervised(talk.answers("A<|im_end|>", "B<|im_end|>")) == ["A<|im_end|>", "B<|im_end|>"]


def test_a_conversation_of_answers_alone_has_nothing_to_go_on_from(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="found the answer alone"):
        Talk(byte_tokenizer(tmp_path), [{"role": "assistant", "content": "Yes."}])


@pytest.mark.parametrize("turns", ["all", "last"])
def test_a_greeting_that_nothing_precedes_stays_as_it_is(tmp_path: Path, turns: str) -> None:
    messages = [{"role": "assistant", "content": "Hello."}, *ASKED[:2]]
    talk = Talk(byte_tokenizer(tmp_path), messages, turns)
    sample = talk.answers("First.<|im_end|>")
    assert talk.prompts[0].startswith("<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nOne?")
    assert talk.supervised(sample) == ["First.<|im_end|>"]


def test_a_text_is_one_prompt(tmp_path: Path) -> None:
    encoder = RecordEncoder(TokeniseOptions(tokenizer=byte_tokenizer(tmp_path)))
    dialogue = Dialogue(Text("Once"), "all", encoder)
    prompt = dialogue.next_prompt()
    assert prompt is not None
    dialogue.take(prompt, Answer(tuple(encoder.tokenizer(" upon")["input_ids"]), "length"))
    assert dialogue.next_prompt() is None
    sample = dialogue.sample()
    assert sample.text == "Once upon"
    assert sample.loss_mask == (0, 0, 0, 0, 1, 1, 1, 1, 1)
