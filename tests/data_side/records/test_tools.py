"""The row formats that training tools document, field by field: read to the same ids and mask, counted, or rejected by name.

Ids by hand: the three special tokens are 0 to 2, a printable ASCII byte b is b - 30, a newline 201.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.rows import reject_of, sample_of
from support.templates import CHATML, byte_tokenizer

# <|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n
CHAT = [0, 87, 85, 71, 84, 201, 67, 1, 201, 0, 67, 85, 85, 75, 85, 86, 67, 80, 86, 201, 91, 81, 1, 201]
CHAT_MASK = [0] * 20 + [1, 1, 1, 0]
# "a" and "yo" as one text.
TEXT = [67, 91, 81]
ASKED, ANSWERED = {"role": "user", "content": "a"}, {"role": "assistant", "content": "yo"}
SHARED = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "yo"}]
PAGE = Path(__file__).parents[3] / "docs/rows.md"


@dataclass(frozen=True)
class Read:
    """A row that is captured: its fields that nothing reads, and its ids and mask."""

    row: Mapping[str, Any]
    unread: tuple[str, ...] = ()
    ids: tuple[int, ...] = tuple(CHAT)
    mask: tuple[int, ...] = tuple(CHAT_MASK)


@dataclass(frozen=True)
class Refused:
    """A row that is rejected, with the code and words of its reason."""

    row: Mapping[str, Any]
    code: str
    reason: str


TOOLS: dict[str, list[Read | Refused]] = {
    "TRL": [
        Read({"messages": [ASKED, ANSWERED], "chat_template_kwargs": {}, "tools": []}),
        Read({"prompt": [ASKED], "completion": [ANSWERED]}),
        Read({"text": "ayo"}, ids=tuple(TEXT), mask=(1, 1, 1)),
        Read({"prompt": "a", "completion": "yo"}, ids=tuple(TEXT), mask=(0, 1, 1)),
        Read({"input_ids": CHAT, "assistant_masks": CHAT_MASK, "completion_mask": [1] * 24}),
        Refused({"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [ANSWERED]}, "preference", "a preference pair"),
        Refused({"chosen": [ASKED, ANSWERED], "rejected": []}, "preference", "a preference pair"),
        Refused({"input_ids": CHAT, "labels": CHAT, "seq_lengths": [24]}, "unread_field", "'seq_lengths'"),
    ],
    "OpenAI fine-tuning": [
        Read({"messages": [ASKED, {**ANSWERED, "weight": 1}], "parallel_tool_calls": False}, ("parallel_tool_calls",)),
        Refused({"messages": [ASKED, {**ANSWERED, "weight": 0}]}, "unsupervised", "found none"),
    ],
    "OpenAI batches": [
        Read({"custom_id": "c", "method": "POST", "url": "/v1", "body": {"messages": [ASKED, ANSWERED], "model": "m"}},
             ("body.model",)),
        Refused({"custom_id": "c", "response": {"body": {}}, "error": None}, "no_known_field", "the answers of a batch"),
    ],
    "LLaMA-Factory": [
        Read({"instruction": "a", "input": "", "output": "yo", "system": "", "history": []}),
        Read({"conversations": SHARED, "system": "", "tools": ""}),
        Read({"conversations": SHARED, "kto_tag": True}, ("kto_tag",)),
        Refused({"conversations": SHARED, "images": ["a.jpg"]}, "unread_field", "'images'"),
        Refused({"conversations": SHARED, "videos": ["a.mp4"]}, "unread_field", "'videos'"),
        Refused({"conversations": SHARED, "audios": ["a.wav"]}, "unread_field", "'audios'"),
    ],
    "axolotl": [
        Read({"conversations": [SHARED[0], {**SHARED[1], "train": True}]}),
        Refused({"messages": [ASKED, {**ANSWERED, "train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}]},
                "unread_field", "'messages.train_detail'"),
        Refused({"segments": [{"label": True, "text": "a"}]}, "no_known_field", "found 'segments'"),
        Read({"input_ids": CHAT, "attention_mask": [1] * 24, "labels": [-100] * 20 + [91, 81, 1, -100]}),
    ],
    "ms-swift": [
        Read({"messages": [ASKED, {**ANSWERED, "loss": True}]}),
        Read({"query": "a", "response": "yo", "history": []}),
        Read({"messages": [ASKED, ANSWERED], "rejected_response": "no", "channel": "c"}, ("channel", "rejected_response")),
        Refused({"messages": [ASKED, ANSWERED], "images": ["a.jpg"]}, "unread_field", "'images'"),
    ],
    "NeMo": [
        Read({"mask": "User", "system": "", "type": "TEXT_TO_VALUE", "conversations": [
            {"from": "User", "value": "a"}, {"from": "Assistant", "value": "yo"},
        ]}, ("type",)),
        Refused({"mask": "Assistant", "conversations": SHARED}, "bad_mask", "name the user's role"),
        Refused({"input": "a", "output": "yo"}, "no_known_field", "found 'input', 'output'"),
    ],
    "Stanford alpaca": [Read({"instruction": "a", "input": "", "output": "yo"})],
    "FastChat": [Read({"id": "c", "conversations": SHARED})],
    "LLaVA": [Refused({"id": "c", "image": "a.jpg", "conversations": SHARED}, "unread_field", "'image'")],
    "SpecForge": [Read({"id": "c", "conversations": [ASKED, ANSWERED]}), Read({"text": "ayo"}, ids=tuple(TEXT), mask=(1, 1, 1))],
    "speculators": [
        Read({"input_ids": CHAT, "loss_mask": CHAT_MASK, "seq_len": 24}, ("seq_len",)),
        Read({"conversations": SHARED}),
    ],
    "torchtune": [
        Read({"messages": [ASKED, ANSWERED]}),
        Read({"conversations": SHARED}),
        Refused({"input": "a", "output": "yo"}, "no_known_field", "found 'input', 'output'"),
    ],
    "mistral-finetune": [
        Read({"messages": [ASKED, {**ANSWERED, "weight": 1}]}),
        Read({"text": "ayo"}, ids=tuple(TEXT), mask=(1, 1, 1)),
    ],
    "OpenRLHF": [
        Read({"input_ids": CHAT, "loss_mask": CHAT_MASK, "attention_mask": [1] * 24}),
        Refused({"input": [ASKED], "output": "yo", "label": 1}, "no_known_field", "found 'input', 'output', 'label'"),
    ],
    "verl": [
        Read({"messages": [ASKED, ANSWERED], "enable_thinking": False}, ("enable_thinking",)),
        Refused({"data_source": "d", "prompt": [ASKED], "ability": "math", "reward_model": {"ground_truth": "1"},
                 "extra_info": {"split": "train"}}, "unsupervised", "found none"),
    ],
    "Megatron-LM": [Read({"text": "ayo", "src": "web", "type": "en"}, ("src", "type"), tuple(TEXT), (1, 1, 1))],
    "Gemini tuning": [
        Refused({"contents": [{"role": "user", "parts": [{"text": "a"}]}], "systemInstruction": {}}, "no_known_field",
                "'contents'"),
    ],
}  # fmt: skip
ROWS = [(tool, outcome) for tool, outcomes in TOOLS.items() for outcome in outcomes]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), CHATML)


@pytest.mark.parametrize(("tool", "outcome"), ROWS, ids=[f"{tool}: {', '.join(outcome.row)}" for tool, outcome in ROWS])
def test_every_documented_field_is_read_counted_or_rejected_by_name(
    tool: str, outcome: Read | Refused, tmp_path: Path, tokenizer: str
) -> None:
    if isinstance(outcome, Refused):
        reject = reject_of(tmp_path, tokenizer, outcome.row)
        assert (reject.code, bool(re.search(outcome.reason, reject.reason))) == (outcome.code, True), reject.reason
        return
    sample = sample_of(tmp_path, tokenizer, outcome.row)
    assert tuple(sample.input_ids.tolist()) == outcome.ids
    assert tuple(sample.loss_mask.tolist()) == outcome.mask
    assert sample.fields.unread == outcome.unread, tool


def test_the_page_lists_these_tools() -> None:
    section = PAGE.read_text().partition("## Rows of other tools")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| ([^|]+?) \|", section, re.MULTILINE)
    assert listed[1:] == list(TOOLS)
    assert len(TOOLS) >= 12
