"""Text rows that hold a chat in the template's own marks: the mask of the same conversation, and the same ids."""

from pathlib import Path
from typing import Any

import pytest

from support.published_templates import MARKS, PUBLISHED
from support.rows import reject_of, sample_of, supervised_texts, text_of, turns
from support.templates import CHATML, DEFAULT_SYSTEM, EOS_AT_END, MARKED, TOOLS, byte_tokenizer

LAST_ENDS_OTHERWISE = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
TEMPLATES = {
    **PUBLISHED, "a default system text": DEFAULT_SYSTEM, "generation marks": MARKED + "{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}", "tools": TOOLS,
}  # fmt: skip
CONVERSATIONS = [
    turns("a", "yo"),
    turns("a", "one", "b", "two\nlines", "c", "drei é 😀"),
    [{"role": "system", "content": "S"}, *turns("a", "<think>hm</think>yo")],
    turns("an assistant\n<im_end>", "x", "last"),
]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
@pytest.mark.parametrize("loss_on", ["assistant", "last"])
def test_a_text_row_has_the_ids_and_mask_of_its_conversation(tmp_path: Path, template: str, loss_on: str) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", template, special=MARKS)
    for messages in CONVERSATIONS:
        spoken: Any = sample_of(tmp_path, tokenizer, {"messages": messages}, loss_on=loss_on)
        text = text_of(tokenizer, spoken)
        written = sample_of(tmp_path, tokenizer, {"text": text}, loss_on=loss_on, strict=True)
        assert written.mask_rule == "text_turns"
        assert written.input_ids.tolist() == spoken.input_ids.tolist()
        assert supervised_texts(tokenizer, written) == supervised_texts(tokenizer, spoken), text
        assert written.loss_mask.tolist() == spoken.loss_mask.tolist()


def test_a_last_turn_may_end_with_a_mark_of_its_own(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", LAST_ENDS_OTHERWISE, special=MARKS)
    text = "<|start|>user<|message|>a<|end|><|start|>assistant<|message|>b<|end|><|start|>user<|message|>c<|end|>"
    sample = sample_of(tmp_path, tokenizer, {"text": text + "<|start|>assistant<|message|>d<|return|>"})
    # The generation prompt ends before the message's mark, which the model writes.
    assert supervised_texts(tokenizer, sample) == ["<|message|>b<|end|>", "<|message|>d<|return|>"]


def test_an_empty_answer_of_a_text_keeps_its_end_mark(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", CHATML)
    text = text_of(tokenizer, sample_of(tmp_path, tokenizer, {"messages": turns("a", "", "b", "yo")}))
    assert supervised_texts(tokenizer, sample_of(tmp_path, tokenizer, {"text": text})) == ["<|im_end|>", "yo<|im_end|>"]


def test_a_text_that_is_cut_inside_a_turn_is_supervised_to_its_end(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", CHATML)
    text = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nyo"
    sample = sample_of(tmp_path, tokenizer, {"text": text})
    assert sample.loss_mask.tolist() == [0] * 20 + [1, 1]


def test_a_text_without_turns_and_all_on_request_are_supervised_throughout(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", CHATML)
    assert sample_of(tmp_path, tokenizer, {"text": "an assistant"}).mask_rule == "all"
    turn = {"text": "<|im_start|>assistant\nyo<|im_end|>"}
    assert sample_of(tmp_path, tokenizer, turn, loss_on="all").loss_mask.tolist() == [1] * 14


def test_turns_that_words_open_are_not_looked_for(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", EOS_AT_END)
    sample = sample_of(tmp_path, tokenizer, {"text": "Q: a\nA: yo</s>"})
    assert (sample.mask_rule, set(sample.loss_mask.tolist())) == ("all", {1})


def test_a_text_whose_turns_have_no_end_of_their_own_is_told(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ '<|User|>' if m.role == 'user' else '<|Assistant|>' }}"
    template += "{{ m.content + '\n' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"
    tokenizer = byte_tokenizer(tmp_path / "t", template, special=MARKS)
    row = {"text": "<|User|>a\n<|Assistant|>yo\nplain"}
    assert sample_of(tmp_path, tokenizer, row).warnings == ("text_holds_turns",)
    assert reject_of(tmp_path, tokenizer, row, strict=True).code == "text_holds_turns"
