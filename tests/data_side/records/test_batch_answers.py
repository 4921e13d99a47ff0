"""OpenAI's batch format: requests are read, answers joined with them by the program of the documentation."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hiddentap.capture.data import RecordEncoder, Reject, Sample, TokeniseOptions
from hiddentap.capture.data.records.sources import read_records
from support.model_folder import write_rows
from support.templates import byte_tokenizer

DOCS = Path(__file__).parents[3] / "docs/rows.md"
ASKED = {"role": "user", "content": "Hm?"}
ANSWERED = {"role": "assistant", "content": "Yes.", "refusal": None}


def request(name: str) -> dict[str, Any]:
    return {
        "custom_id": name,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": [ASKED], "max_tokens": 9},
    }


def answer(name: str, error: object = None) -> dict[str, Any]:
    body = {"id": "chatcmpl-1", "choices": [{"index": 0, "message": ANSWERED, "finish_reason": "stop"}]}
    response = None if error else {"status_code": 200, "request_id": "r", "body": body}
    return {"id": "batch_req_1", "custom_id": name, "response": response, "error": error}


def program() -> str:
    text = DOCS.read_text(encoding="utf-8")
    return text.split("batch *output*", 1)[1].split("```python\n", 1)[1].split("```", 1)[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_rows(tmp_path / "requests.jsonl", [request("a"), request("b"), request("c")])
    write_rows(tmp_path / "answers.jsonl", [answer("c"), answer("a"), answer("b", {"code": "server_error"})])
    return tmp_path


def test_answers_are_joined_with_their_requests_by_the_documented_program(folder: Path) -> None:
    subprocess.run([sys.executable, "-c", program()], cwd=folder, env=os.environ, check=True, timeout=60)
    encoder = RecordEncoder(TokeniseOptions(tokenizer=byte_tokenizer(folder / "tokenizer")))
    items = [encoder.item(row) for row in read_records([str(folder / "rows.jsonl")])]
    assert [item.sample_id for item in items] == ["c", "a"]
    first = items[0]
    assert isinstance(first, Sample)
    text = encoder.tokenizer.decode(first.input_ids)
    assert text == "<|im_start|>user\nHm?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
    assert encoder.tokenizer.decode(first.input_ids[first.loss_mask == 1]) == "Yes.<|im_end|>"


def test_answers_alone_are_refused_with_the_way_to_join_them(folder: Path) -> None:
    encoder = RecordEncoder(TokeniseOptions(tokenizer=byte_tokenizer(folder / "tokenizer")))
    item = encoder.item(next(iter(read_records([str(folder / "answers.jsonl")]))))
    assert isinstance(item, Reject)
    assert item.code == "no_known_field"
    assert "join them with the messages of their requests by custom_id (docs/rows.md)" in item.reason
