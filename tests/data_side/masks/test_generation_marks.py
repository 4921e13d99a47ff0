"""The loss mask from a template's own `{% generation %}` marks."""

from pathlib import Path

from support.rows import reject_of, sample_of, supervised_texts, turns
from support.templates import MARKED, byte_tokenizer, merging_tokenizer

IN_A_MACRO = (
    "{% macro turn(m) %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{% endmacro %}"
    "{{ 'Some words ahead of it all.\\n' }}{% for m in messages %}{{ turn(m) + '\\n' }}{% endfor %}"
)


def test_exactly_the_marks_are_supervised(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", MARKED)

    sample = sample_of(tmp_path, tokenizer, {"messages": turns("a", "yo", "b", "")})

    assert supervised_texts(tokenizer, sample) == ["yo<|im_end|>", "<|im_end|>"]
    assert sample.mask_rule == "generation_marks"


def test_marks_win_over_what_the_template_does_to_the_content(tmp_path: Path) -> None:
    template = MARKED.replace("{{ m.content + '<|im_end|>' }}{% endg", "{{ m.content + m.content }}{% endg")
    tokenizer = byte_tokenizer(tmp_path / "t", template)
    assert supervised_texts(tokenizer, sample_of(tmp_path, tokenizer, {"messages": turns("a", "yo")})) == ["yoyo"]


def test_marks_may_leave_turns_out(tmp_path: Path) -> None:
    template = MARKED.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
    tokenizer = byte_tokenizer(tmp_path / "t", template)
    sample = sample_of(tmp_path, tokenizer, {"messages": turns("a", "one", "b", "two")})
    assert supervised_texts(tokenizer, sample) == ["two<|im_end|>"]


def test_a_token_across_the_start_of_a_mark_is_not_supervised_and_counted(tmp_path: Path) -> None:
    tokenizer = merging_tokenizer(tmp_path / "t", MARKED, merges=(("Ċ", "Ċ"),))
    sample = sample_of(tmp_path, tokenizer, {"messages": turns("a", "\nyo")})
    assert supervised_texts(tokenizer, sample) == ["yo<|im_end|>"]
    assert sample.warnings == ("token_straddles_span",)


def test_marks_that_come_out_over_other_text_reject_the_row(tmp_path: Path) -> None:
    reject = reject_of(tmp_path, byte_tokenizer(tmp_path / "t", IN_A_MACRO), {"messages": turns("a", "yo")})
    assert reject.code == "marks_misplaced"
    assert "--loss-on all" in reject.reason


def test_marks_around_user_text_reject_the_row_and_name_its_role(tmp_path: Path) -> None:
    template = MARKED.replace("m.role == 'assistant'", "m.role != 'system'")
    reject = reject_of(tmp_path, byte_tokenizer(tmp_path / "t", template), {"messages": turns("a", "yo")})
    assert reject.code == "marks_misplaced"
    assert "message 0, of role user" in reject.reason


def test_all_beats_marks(tmp_path: Path) -> None:
    sample = sample_of(tmp_path, byte_tokenizer(tmp_path / "t", MARKED), {"messages": turns("a", "yo")}, loss_on="all")
    assert sample.loss_mask.all()
    assert sample.mask_rule == "all"
