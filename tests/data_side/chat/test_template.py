"""Template arguments and the date: fixed for the run, and the rendering that of transformers."""

import datetime
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hiddentap.capture.data.chat.template import with_fixed_date
from hiddentap.capture.data.options import TokeniseOptions
from hiddentap.models.errors import UsageError
from support.rows import reject_of, sample_of, supervised_texts, text_of, tokenise_rows, turns
from support.templates import CHATML, CLOCK, DEFAULT_SYSTEM, REWRITING, TOOLS, byte_tokenizer


@pytest.mark.parametrize("template", [CHATML, DEFAULT_SYSTEM, REWRITING, TOOLS])
def test_ids_are_those_of_one_rendering_by_transformers(tmp_path: Path, template: str) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", template)
    messages = turns("a é", "one", "b", "<think>\nso\n</think>\n\ntwo")

    sample = sample_of(tmp_path, tokenizer, {"messages": messages})

    plain = AutoTokenizer.from_pretrained(tokenizer).apply_chat_template(messages, tokenize=True, return_dict=True)
    assert sample.input_ids.tolist() == plain["input_ids"]
    assert (sample.input_ids.dtype.name, sample.loss_mask.dtype.name) == ("int32", "uint8")


def test_the_template_reads_the_runs_date_and_not_the_clock(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", CLOCK)

    sample = sample_of(tmp_path, tokenizer, {"messages": turns("a", "yo")})

    assert text_of(tokenizer, sample).startswith("Today: 03 Feb 2024\n<|im_start|>user\n")
    assert supervised_texts(tokenizer, sample) == ["yo<|im_end|>"]


@pytest.mark.parametrize(
    ("format_", "expected"),
    [
        ("%d %b %Y", "03 Feb 2024"),
        ("%Y-%m-%d", "2024-02-03"),
        ("%A, %B %-d, %Y", "Saturday, February 3, 2024"),
        ("%H:%M:%S", "00:00:00"),
        ("100%% %%d %d", "100% %d 03"),
        ("%j %y %F", "034 24 2024-02-03"),
    ],
)
def test_every_common_date_format_is_answered(tmp_path: Path, format_: str, expected: str) -> None:
    template = f"{{% if strftime_now is defined %}}{{% set d = strftime_now({format_!r}) %}}{{% endif %}}{{{{ d }}}}"
    tokenizer = byte_tokenizer(tmp_path / "t", template)
    assert (
        text_of(tokenizer, sample_of(tmp_path, tokenizer, {"messages": turns("a")}, loss_on="all", on_dropped="keep"))
        == expected
    )


@pytest.mark.parametrize("text", ["\n\n{{ 'x' }}", "  {% if true %}x{% endif %}\n\n", "{%- if true %} x{% endif -%}\n"])
def test_fixing_the_date_moves_no_white_space(tmp_path: Path, text: str) -> None:
    text += "{# strftime_now #}"
    tokenizer = AutoTokenizer.from_pretrained(byte_tokenizer(tmp_path / "t"))
    fixed = with_fixed_date(text, datetime.date(2024, 2, 3))
    rendered = [tokenizer.apply_chat_template(turns("a"), chat_template=each, tokenize=False) for each in (text, fixed)]
    assert fixed != text
    assert rendered[0] == rendered[1]


def test_template_arguments_reach_the_template(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", "{{ mood }}|" + CHATML)
    sample = sample_of(tmp_path, tokenizer, {"messages": turns("a", "yo")}, template_args={"mood": "calm"})
    assert text_of(tokenizer, sample).startswith("calm|<|im_start|>user")


def test_a_template_given_by_the_user_replaces_the_tokenizers_own(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", CHATML)
    template = "{% for m in messages %}{{ m.role[0] + m.content }}{% endfor %}"
    sample = sample_of(tmp_path, tokenizer, {"messages": turns("1", "2")}, chat_template=template)
    assert text_of(tokenizer, sample) == "u1a2"


def test_a_tokenizer_with_two_templates_uses_the_one_for_tools_where_a_row_has_tools(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(byte_tokenizer(tmp_path / "t"))
    tokenizer.chat_template = {"default": CHATML, "tool_use": TOOLS}
    tokenizer.save_pretrained(tmp_path / "t")
    row = {"messages": turns("a", "yo")}

    plain, with_tools = tokenise_rows(tmp_path, str(tmp_path / "t"), row, {**row, "tools": [{"name": "look"}]})

    assert text_of(str(tmp_path / "t"), plain).startswith("<|im_start|>user")
    assert text_of(str(tmp_path / "t"), with_tools).startswith('<|im_start|>system\n{"name": "look"}<|im_end|>')


def test_an_error_inside_the_template_rejects_the_row_with_its_words(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    tokenizer = byte_tokenizer(tmp_path / "t", template)

    bad, good = tokenise_rows(
        tmp_path, tokenizer, {"messages": [*turns("a"), *turns("b")]}, {"messages": turns("a", "yo")}
    )

    assert (bad.code, bad.line) == ("template_error", 1)
    assert bad.reason.endswith("it says: roles must alternate")
    assert supervised_texts(tokenizer, good) == ["yo"]


@pytest.mark.parametrize(
    "broken",
    ["{{ messages[0].content + 1 }}", "{{ messages[9].content.x }}", "{{ 1 // 0 }}", "{{ missing() }}"],
)
def test_whatever_the_template_raises_rejects_the_row(tmp_path: Path, broken: str) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", broken)
    assert reject_of(tmp_path, tokenizer, {"messages": turns("a", "yo")}).code == "template_error"


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("\n{% if %}", r"Expected an expression, got 'end of statement block' \(line 2\)"),
        ("{{ strftime_now('%d') }}\n{{ messages|nosuch }}", r"No filter named 'nosuch'. \(line 2\)"),
        ("{% for m in messages %}{% generation %}{{ m.content }}", r"\(line 1\)"),
    ],
)
def test_a_template_that_jinja_cannot_read_is_wrong_use_for_conversations_and_fine_for_text(
    tmp_path: Path, broken: str, reason: str
) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", broken)
    assert sample_of(tmp_path, tokenizer, {"text": "ab"}).loss_mask.tolist() == [1, 1]
    with pytest.raises(UsageError, match=f"chat template of .*/t cannot be read by Jinja: .*{reason}"):
        tokenise_rows(tmp_path, tokenizer, {"text": "ab"}, {"messages": turns("a", "yo")})


def test_a_tokenizer_without_template_is_wrong_use_for_conversations_and_fine_for_text(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", None)
    assert sample_of(tmp_path, tokenizer, {"text": "ab"}).loss_mask.tolist() == [1, 1]
    with pytest.raises(UsageError, match="expected a chat template; found none in the tokenizer"):
        tokenise_rows(tmp_path, tokenizer, {"messages": turns("a", "yo")})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("on_too_long", "cut", "on_too_long must be one of truncate, drop; got 'cut'"),
        ("loss_on", "user", "loss_on must be one of assistant, last, all; got 'user'"),
        ("max_length", 0, "max_length must be at least 1; got 0"),
        ("template_args", {"tokenize": False}, "found 'tokenize'"),
        ("template_args", {"strftime_now": 1}, "found 'strftime_now'"),
        ("template_date", "3 Feb", "expected template_date as YYYY-MM-DD; found '3 Feb'"),
    ],
)
def test_options_outside_their_range_are_refused(name: str, value: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TokeniseOptions(tokenizer="t", **{name: value})
