"""A small tokenizer with the Kimi family's tokens, and templates that write its turns, made for these tests.

One token per byte and one per mark. `PLAIN` is K2's and Linear's kind, `THINKING` writes a think block into every answer (empty
where the row has none), and `OPENED` opens it in the generation prompt.
"""

from pathlib import Path

from support.templates import byte_tokenizer

MARKS = (
    "[BOS]", "[EOS]", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "<think>", "</think>",
)  # fmt: skip

_HEADER = (
    "{% set kind = m.role if m.role in ['user', 'assistant'] else 'system' %}"
    "{{ '<|im_' + kind + '|>' + (m.name or m.role) + '<|im_middle|>' }}"
)
_DECLARED = "{% if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' + (tools | tojson) + '<|im_end|>' }}{% endif %}"
_CALLS = (
    "{% if m.tool_calls %}{{ '<|tool_calls_section_begin|>' }}{% for c in m.tool_calls %}"
    "{{ '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' + (c.function.arguments | tojson) }}"
    "{{ '<|tool_call_end|>' }}{% endfor %}{{ '<|tool_calls_section_end|>' }}{% endif %}"
)
_THOUGHT = "{% if m.role == 'assistant' %}{{ '<think>' + (m.reasoning_content or '') + '</think>' }}{% endif %}"
_CONTENT = (
    "{% if m.role == 'tool' %}{{ 'Result of ' + m.tool_call_id + ':' }}{% endif %}{{ m.content or '' }}"
    + _CALLS
    + "{{ '<|im_end|>' }}{% endfor %}"
)
_OPEN = "{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}"

PLAIN = _DECLARED + "{% for m in messages %}" + _HEADER + _CONTENT + _OPEN + "{% endif %}"
THINKING = _DECLARED + "{% for m in messages %}" + _HEADER + _THOUGHT + _CONTENT + _OPEN + "{% endif %}"
OPENED = _DECLARED + "{% for m in messages %}" + _HEADER + _THOUGHT + _CONTENT + _OPEN + "{{ '<think>' }}{% endif %}"


def kimi_tokenizer(folder: Path, template: str | None = PLAIN) -> str:
    """A folder with the tokenizer: the marks in order of `MARKS`, then the bytes."""
    return byte_tokenizer(folder, template, special=MARKS)


def ids(*pieces: str) -> list[int]:
    """Token ids of marks and plain ASCII text, put together without any tokenizer: byte tokens stand sorted by their letter."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(0x100 + k) for k, byte in enumerate(b for b in range(256) if b not in printable)}
    order = sorted(letters.values())
    found: list[int] = []
    for piece in pieces:
        found += (
            [MARKS.index(piece)] if piece in MARKS else [len(MARKS) + order.index(letters[b]) for b in piece.encode()]
        )
    return found


def turn(role: str, *body: str, name: str | None = None) -> list[str]:
    """The pieces of one whole turn."""
    return [f"<|im_{role}|>", name or role, "<|im_middle|>", *body, "<|im_end|>"]
