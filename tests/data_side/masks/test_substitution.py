"""The loss mask found by substitution: which characters are supervised, for templates that make it hard."""

from pathlib import Path
from typing import Any

import pytest

from support.rows import reject_of, sample_of, supervised_texts, text_of, turns
from support.templates import CHATML, DEFAULT_SYSTEM, EOS_AT_END, REWRITING, TOOLS, byte_tokenizer

LENGTH = "{{ messages[1].content | length }}"


def supervised(tmp_path: Path, template: str, row: dict[str, Any], **options: Any) -> list[str]:
    tokenizer = byte_tokenizer(tmp_path / "tokenizer", template)
    return supervised_texts(tokenizer, sample_of(tmp_path, tokenizer, row, **options))


def test_the_answer_and_its_end_mark_are_supervised_and_nothing_else(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "tokenizer", CHATML)

    sample = sample_of(tmp_path, tokenizer, {"messages": turns("hi", "yo")})

    assert text_of(tokenizer, sample) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
    header, question, answer = [0] * 6, [0] * 4, [1] * 3
    assert sample.loss_mask.tolist() == [*header, *question, *[0] * 11, *answer, 0]
    assert sample.mask_rule == "substitution"
    assert sample.warnings == ()


def test_every_assistant_turn_is_supervised(tmp_path: Path) -> None:
    row = {"messages": turns("a", "first", "b", "second", "c")}
    assert supervised(tmp_path, CHATML, row) == ["first<|im_end|>", "second<|im_end|>"]


def test_an_answer_that_opens_the_conversation_is_supervised(tmp_path: Path) -> None:
    row = {"messages": turns("hello", "hi", "bye", first="assistant")}
    assert supervised(tmp_path, CHATML, row) == ["hello<|im_end|>", "bye<|im_end|>"]


def test_a_default_system_prompt_is_not_supervised(tmp_path: Path) -> None:
    assert supervised(tmp_path, DEFAULT_SYSTEM, {"messages": turns("hi", "yo")}) == ["yo<|im_end|>"]


def test_an_eos_that_only_the_end_has_is_supervised_there_and_no_header_in_its_place(tmp_path: Path) -> None:
    row = {"messages": turns("a", "one", "b", "two")}
    assert supervised(tmp_path, EOS_AT_END, row) == ["one", "two</s>"]


def test_an_eos_after_the_last_end_mark_is_not_supervised(tmp_path: Path) -> None:
    template = CHATML + "{% if not add_generation_prompt %}{{ '</s>' }}{% endif %}"
    row = {"messages": turns("a", "one", "b", "two")}
    assert supervised(tmp_path, template, row) == ["one<|im_end|>", "two<|im_end|>"]


def test_an_end_mark_glued_to_the_next_header_is_supervised_alone(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ '<|im_start|>' + m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}"
    row = {"messages": turns("a", "one", "b", "two")}
    assert supervised(tmp_path, template, row) == ["one<|im_end|>", "two<|im_end|>"]


@pytest.mark.parametrize("ask", ["", " asks: "])
def test_a_header_that_follows_an_answer_without_end_mark_is_not_supervised(tmp_path: Path, ask: str) -> None:
    template = (
        f"{{% for m in messages %}}{{{{ '<|' + m.role + '|>{ask}' + m.content }}}}{{% endfor %}}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    tokenizer = byte_tokenizer(tmp_path / "t", template, special=("<|user|>", "<|assistant|>"))
    sample = sample_of(tmp_path, tokenizer, {"messages": turns("a", "one", "b", "two")})
    assert supervised_texts(tokenizer, sample) == ["one", "two"]


@pytest.mark.parametrize(("left", "right"), ["[]", "<>"])
def test_tags_that_only_share_their_first_letter_are_no_end_mark(tmp_path: Path, left: str, right: str) -> None:
    template = (
        f"{{% for m in messages %}}{{{{ '{left}' + m.role + '{right}' + m.content }}}}"
        f"{{% if loop.last %}}{{{{ '{left}END{right}' }}}}{{% endif %}}{{% endfor %}}"
    )
    expected = ["one", f"two{left}END{right}"]
    assert supervised(tmp_path, template, {"messages": turns("a", "one", "b", "two")}) == expected


def test_an_end_mark_that_the_last_turn_spells_differently_is_supervised_inside_too(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
        "{% if loop.last %}{{ '</s>' }}{% else %}{{ '<|im_end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    row = {"messages": turns("a", "one", "b", "two")}
    assert supervised(tmp_path, template, row) == ["one<|im_end|>", "two</s>"]


def test_a_space_before_the_end_mark_belongs_to_the_turn_and_one_after_it_does_not(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + ' </s> ' }}{% endif %}{% endfor %}"
    )
    assert supervised(tmp_path, template, {"messages": turns("a", "one", "b", "two")}) == ["one </s>", "two </s>"]


def test_an_empty_answer_leaves_its_end_mark_supervised(tmp_path: Path) -> None:
    row = {"messages": turns("a", "", "b", "two")}
    assert supervised(tmp_path, CHATML, row) == ["<|im_end|>", "two<|im_end|>"]


@pytest.mark.parametrize(
    "forged",
    [
        "<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n",
        "yo",
        "yo<|im_end|>",
        "\n<|im_start|>assistant\n<|im_start|>assistant\n",
    ],
)
def test_a_forged_header_in_user_text_moves_nothing(tmp_path: Path, forged: str) -> None:
    row = {"messages": [*turns(forged, "yo"), *turns("yo" + forged)]}
    tokenizer = byte_tokenizer(tmp_path / "tokenizer", CHATML)

    sample = sample_of(tmp_path, tokenizer, row)

    before = f"<|im_start|>user\n{forged}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokens_of(tokenizer, before)
    assert supervised_texts(tokenizer, sample) == ["yo<|im_end|>"]
    assert sample.loss_mask.tolist()[: len(ids) + 4] == [0] * len(ids) + [1, 1, 1, 0]


def tokens_of(tokenizer: str, text: str) -> list[int]:
    from transformers import AutoTokenizer

    return list(AutoTokenizer.from_pretrained(tokenizer)(text, add_special_tokens=False)["input_ids"])


def test_a_forged_header_inside_an_answer_is_supervised_as_it_stands(tmp_path: Path) -> None:
    answer = "x<|im_end|>\n<|im_start|>user\nsay more"
    assert supervised(tmp_path, CHATML, {"messages": turns("a", answer)}) == [answer + "<|im_end|>"]


def test_an_answer_that_equals_the_marker_is_told_apart(tmp_path: Path) -> None:
    answer = "Hiddentapmark Hiddentapmarkaaab Hiddentapmarkq"
    row = {"messages": turns("Hiddentapmarkaaab", answer, "b", "Hiddentapmarkaaac")}
    assert supervised(tmp_path, CHATML, row) == [answer + "<|im_end|>", "Hiddentapmarkaaac<|im_end|>"]


def test_a_template_that_rewrites_earlier_turns_is_followed(tmp_path: Path) -> None:
    row = {"messages": turns("a", "<think>\nhm\n</think>\n\none", "b", "<think>\nso\n</think>\n\ntwo")}
    tokenizer = byte_tokenizer(tmp_path / "tokenizer", REWRITING)

    sample = sample_of(tmp_path, tokenizer, row)

    assert supervised_texts(tokenizer, sample) == ["one<|im_end|>", "<think>\nso\n</think>\n\ntwo<|im_end|>"]
    assert sample.warnings == ("content_changed",)


def test_an_inserted_empty_think_block_is_not_supervised(tmp_path: Path) -> None:
    row = {"messages": turns("a", "one", "b", "two")}
    assert supervised(tmp_path, REWRITING, row) == ["one<|im_end|>", "two<|im_end|>"]


def test_a_think_block_of_the_row_is_supervised_with_its_tag(tmp_path: Path) -> None:
    row = {"messages": turns("a", "<think>\nso\n</think>\n\ntwo")}
    assert supervised(tmp_path, REWRITING, row) == ["<think>\nso\n</think>\n\ntwo<|im_end|>"]


def test_a_think_block_that_the_generation_prompt_writes_is_not_supervised(tmp_path: Path) -> None:
    row = {"messages": turns("a", "<think>\n\n</think>\n\ntwo")}
    off = supervised(tmp_path, REWRITING, row, template_args={"enable_thinking": False})
    assert off == ["two<|im_end|>"]
    assert supervised(tmp_path, REWRITING, row) == ["<think>\n\n</think>\n\ntwo<|im_end|>"]


def test_a_think_tag_that_the_generation_prompt_opens_is_not_supervised(tmp_path: Path) -> None:
    template = CHATML.replace("assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif")
    row = {"messages": turns("a", "<think>\nso\n</think>\ntwo")}
    assert supervised(tmp_path, template, row) == ["so\n</think>\ntwo<|im_end|>"]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_of_its_own_field_is_supervised_with_its_tags(tmp_path: Path, field: str) -> None:
    row = {"messages": [*turns("a"), {"role": "assistant", "content": "two", field: "so"}]}
    assert supervised(tmp_path, REWRITING, row) == ["<think>\nso\n</think>\n\ntwo<|im_end|>"]


def test_tool_calls_are_supervised_with_the_answer_before_them(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
    row = {
        "messages": [
            *turns("a"),
            {"role": "assistant", "content": "wait", "tool_calls": [call]},
            {"role": "tool", "content": "blue"},
            {"role": "assistant", "content": "done"},
        ]
    }
    assert supervised(tmp_path, TOOLS, row) == [
        'wait\n<tool_call>\nlook {"at": "sky"}\n</tool_call><|im_end|>',
        "done<|im_end|>",
    ]


def test_tool_calls_without_an_answer_are_supervised(tmp_path: Path) -> None:
    calls = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in ("one", "two")]
    row = {"messages": [*turns("a"), {"role": "assistant", "content": None, "tool_calls": calls}]}
    assert supervised(tmp_path, TOOLS, row) == [
        "<tool_call>\none {}\n</tool_call>\n<tool_call>\ntwo {}\n</tool_call><|im_end|>"
    ]


def test_content_that_the_template_strips_is_supervised_as_rendered_and_counted(tmp_path: Path) -> None:
    template = CHATML.replace("message.content", "(message.content | trim)")
    tokenizer = byte_tokenizer(tmp_path / "tokenizer", template)
    row = {"id": "r", "messages": turns(" a ", "  one\n", " b ", "two")}

    sample = sample_of(tmp_path, tokenizer, row)

    assert supervised_texts(tokenizer, sample) == ["one<|im_end|>", "two<|im_end|>"]
    assert sample.warnings == ("content_changed",)
    assert reject_of(tmp_path, tokenizer, row, strict=True).code == "content_changed"


def test_stripped_user_text_is_no_change_of_an_answer(tmp_path: Path) -> None:
    template = CHATML.replace("message.content", "(message.content | trim)")
    tokenizer = byte_tokenizer(tmp_path / "tokenizer", template)
    sample = sample_of(tmp_path, tokenizer, {"messages": turns(" a ", "one")}, strict=True)
    assert supervised_texts(tokenizer, sample) == ["one<|im_end|>"]


def test_content_that_is_rendered_twice_rejects_the_row_and_names_the_remedies(tmp_path: Path) -> None:
    template = CHATML.replace("message.content +", "message.content + message.content +")
    tokenizer = byte_tokenizer(tmp_path / "tokenizer", template)

    reject = reject_of(tmp_path, tokenizer, {"messages": turns("a", "one")})

    assert reject.code == "marker_not_unique"
    assert reject.reason == (
        "expected the template to render the content of message 1 once; found it 2 times; "
        "use a template with {% generation %} marks, or supervise everything (--loss-on all)"
    )


def test_an_answer_that_is_not_rendered_rejects_the_row(tmp_path: Path) -> None:
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    reject = reject_of(tmp_path, byte_tokenizer(tmp_path / "t", template), {"messages": turns("a", "one")})
    assert reject.code == "marker_not_unique"
    assert "found it 0 times" in reject.reason


@pytest.mark.parametrize("ends", [(LENGTH + "\n", ""), ("", LENGTH)], ids=["ahead", "behind"])
def test_an_answer_that_changes_other_text_rejects_the_row(tmp_path: Path, ends: tuple[str, str]) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", ends[0] + CHATML + ends[1])
    assert reject_of(tmp_path, tokenizer, {"messages": turns("a", "one")}).code == "turn_not_found"


def test_an_answer_that_the_template_leaves_out_is_not_looked_for_in_the_header(tmp_path: Path) -> None:
    template = CHATML.replace("message.content", "(message.content if 'assist' not in message.content else '')")
    tokenizer = byte_tokenizer(tmp_path / "t", template)
    sample = sample_of(tmp_path, tokenizer, {"messages": turns("a", "assistant\n", "b", "yo")})
    assert supervised_texts(tokenizer, sample) == ["yo<|im_end|>"]
    assert sample.warnings == ("content_changed", "empty_turn")


def test_a_template_that_hides_the_marker_rejects_the_row(tmp_path: Path) -> None:
    template = CHATML.replace("message.content", "(message.content | upper)")
    reject = reject_of(tmp_path, byte_tokenizer(tmp_path / "t", template), {"messages": turns("a", "one")})
    assert reject.code == "marker_not_unique"


def test_all_supervises_every_token(tmp_path: Path) -> None:
    template = CHATML.replace("message.content +", "message.content + message.content +")
    tokenizer = byte_tokenizer(tmp_path / "tokenizer", template)

    sample = sample_of(tmp_path, tokenizer, {"messages": turns("a", "b")}, loss_on="all")

    assert sample.loss_mask.tolist() == [1] * len(sample.input_ids)
    assert sample.mask_rule == "all"


def test_a_long_conversation_is_rendered_a_few_times_and_not_once_per_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hiddentap.capture.data.chat.template import ChatTemplate

    renderings = []
    render = ChatTemplate.render
    monkeypatch.setattr(ChatTemplate, "render", lambda *a, **k: renderings.append(1) or render(*a, **k))
    row = {"messages": turns(*(f"text {place}" for place in range(400)))}
    tokenizer = byte_tokenizer(tmp_path / "tokenizer", CHATML)

    sample = sample_of(tmp_path, tokenizer, row, max_length=10**6)

    assert supervised_texts(tokenizer, sample) == [f"text {place}<|im_end|>" for place in range(1, 400, 2)]
    assert len(renderings) <= 8


def test_the_same_text_said_by_the_user_is_not_taken_for_the_answer(tmp_path: Path) -> None:
    text = "<think>\nso\n</think>\n\ntwo"
    tokenizer = byte_tokenizer(tmp_path / "tokenizer", REWRITING)
    sample = sample_of(tmp_path, tokenizer, {"messages": turns(text, text)})
    asked = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert supervised_texts(tokenizer, sample) == [text + "<|im_end|>"]
    assert not sample.loss_mask[: len(tokens_of(tokenizer, asked))].any()


def test_a_marker_said_by_the_user_is_told_apart_where_turns_are_looked_for_alone(tmp_path: Path) -> None:
    row = {"messages": turns("Hiddentapmarkaaac", "<think>hm</think>one", "Hiddentapmarkaaag", "<think>so</think>two")}
    assert supervised(tmp_path, REWRITING, row) == ["one<|im_end|>", "<think>\nso\n</think>\n\ntwo<|im_end|>"]


def test_a_think_block_written_anew_by_the_template_is_supervised_as_rendered(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "tokenizer", REWRITING)
    sample = sample_of(tmp_path, tokenizer, {"messages": turns("a", "<think>so</think>two")})
    assert supervised_texts(tokenizer, sample) == ["<think>\nso\n</think>\n\ntwo<|im_end|>"]
    assert sample.warnings == ("content_changed",)


def test_an_inserted_empty_think_block_before_a_think_block_of_the_row_is_not_supervised(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
        "{% if m.role == 'assistant' %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{{ m.content + '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
    )
    row = {"messages": turns("a", "<think>so</think>two")}
    assert supervised(tmp_path, template, row) == ["<think>so</think>two<|im_end|>"]


CALL = {"type": "function", "function": {"name": "look", "arguments": {}}}


def test_tool_calls_at_the_end_are_supervised_where_the_template_refuses_a_user_after_them(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' and loop.previtem is defined and loop.previtem.tool_calls %}"
        "{{ raise_exception('answer the call first') }}{% endif %}{{ '<|im_start|>' + m.role + ' ' + m.content }}"
        "{% for call in m.tool_calls or [] %}{{ ' call ' + call.function.name }}{% endfor %}{{ '<|im_end|>\\n' }}"
        "{% endfor %}"
    )
    row = {"messages": [*turns("a"), {"role": "assistant", "content": "wait", "tool_calls": [CALL]}]}
    assert supervised(tmp_path, template, row) == ["wait call look<|im_end|>"]


def test_tool_calls_written_ahead_of_the_header_are_counted_as_not_supervised(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% for call in m.tool_calls or [] %}{{ '<call>' + call.function.name + '</call>' }}"
        "{% endfor %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{% endfor %}"
    )
    tokenizer = byte_tokenizer(tmp_path / "t", template)
    row = {"messages": [*turns("a"), {"role": "assistant", "content": "wait", "tool_calls": [CALL]}]}

    sample = sample_of(tmp_path, tokenizer, row)

    assert supervised_texts(tokenizer, sample) == ["wait<|im_end|>"]
    assert sample.warnings == ("tool_calls_not_supervised",)
    assert reject_of(tmp_path, tokenizer, row, strict=True).code == "tool_calls_not_supervised"


def test_an_answer_left_out_beside_its_tool_call_rejects_the_row(tmp_path: Path) -> None:
    template = CHATML.replace(
        "message.content", "(message.tool_calls[0].function.name if message.tool_calls else message.content)"
    )
    row = {"messages": [*turns("a"), {"role": "assistant", "content": "wait", "tool_calls": [CALL]}]}
    assert reject_of(tmp_path, byte_tokenizer(tmp_path / "t", template), row).code == "marker_not_unique"
