"""What the commands say of input rows: rejects and their limit, fields that nothing read, and data that drives terminals."""

import json
from collections.abc import Callable
from pathlib import Path

from support.model_folder import CHATS, chat, write_rows

Run = Callable[..., tuple[int, str, str]]
CALL = {"type": "function", "function": {"name": "look", "arguments": {}}}


def capture(run: Run, llama: Path, data: Path, out: Path, *more: object) -> tuple[int, str, str]:
    return run("capture", "--model", llama, "--data", data, "--layer-ids", "1", "--out", out, *more)


def test_too_many_rejects_end_the_run_with_each_first_reason_and_a_list(run: Run, llama: Path, tmp_path: Path) -> None:
    misspelt = [{"id": f"m{n}", "mesages": []} for n in range(12)]
    data = write_rows(tmp_path / "d.jsonl", [*misspelt, {"id": "e", "messages": []}, *CHATS * 3])
    code, _, err = capture(run, llama, data, tmp_path / "out")
    assert code == 1
    assert "expected at most 10 % of the rows to be rejected; found 13 of 28: 12 no_known_field, first at" in err
    assert f"; 1 empty_conversation, first at {data}:13: expected at least one message; found none" in err
    lines = [json.loads(line) for line in (tmp_path / "out/rejects.jsonl").read_text().splitlines()]
    assert [one["id"] for one in lines] == [*(f"m{n}" for n in range(12)), "e"]
    assert not (tmp_path / "out/plan/plan.json").exists()

    code, out, _ = capture(run, llama, data, tmp_path / "out", "--max-reject-rate", 0.5)
    assert code == 0
    assert "15 captured, 13 rejected" in out
    assert f"12 no_known_field; first {data}:1: expected one of messages" in out


def test_a_strict_run_lists_its_reject_too(run: Run, llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "d.jsonl", [*CHATS, {"id": "x"}])
    code, _, err = capture(run, llama, data, tmp_path / "out", "--strict")
    assert (code, f"{data}, line 6" in err) == (1, True)
    (line,) = (tmp_path / "out/rejects.jsonl").read_text().splitlines()
    assert json.loads(line)["detail"] == {"code": "no_known_field"}


def test_a_field_that_nothing_read_is_in_audit_summary_and_manifest(run: Run, llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "d.jsonl", [*CHATS, chat("Hm", "Yes", topic="t")])
    audited = run("audit", "--model", llama, "--data", data)[1]
    assert "fields read  messages 6, id 5" in " ".join(audited.split("\n")).replace("   ", "  ")
    assert "field 'topic' of 1 samples" in audited
    code, out, _ = capture(run, llama, data, tmp_path / "out")
    assert (code, "field 'topic' of 1 samples" in out) == (0, True)
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["counts"]["unread_fields"] == {"topic": 1}
    values = json.loads(run("audit", "--model", llama, "--data", data, "--json")[1])
    assert (values["fields_read"], values["fields_unread"]) == ({"messages": 6, "id": 5}, {"topic": 1})


def test_dropped_parts_are_rejects_or_kept_with_the_first_place(run: Run, llama: Path, tmp_path: Path) -> None:
    messages = [
        *CHATS[0]["messages"],
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
    ]
    data = write_rows(tmp_path / "d.jsonl", [*CHATS, {"messages": messages}])
    rejecting = capture(run, llama, data, tmp_path / "a")
    assert (rejecting[0], "5 captured, 1 rejected" in rejecting[1]) == (0, True)
    assert f"1 tool_calls_dropped; first {data}:6: expected the template to render the whole row" in rejecting[1]
    keeping = capture(run, llama, data, tmp_path / "b", "--on-dropped", "keep")
    assert (keeping[0], "6 captured, 0 rejected" in keeping[1]) == (0, True)
    assert f"1 tool_calls_dropped; first {data}:6" in keeping[1]
    raising = capture(run, llama, data, tmp_path / "c", "--on-dropped", "raise")
    assert (raising[0], f"{data}, line 6: expected the template" in raising[2]) == (1, True)
    code, _, err = capture(run, llama, data, tmp_path / "a", "--on-dropped", "keep")
    assert (code, 'tokenisation.on_dropped: "reject" -> "keep"' in err) == (2, True)


def test_an_audit_holds_samples_to_the_models_positions_as_a_run_does(run: Run, llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "d.jsonl", [{"text": "a" * 1000}])
    code, out, err = run("audit", "--model", llama, "--data", data, "--max-length", 100_000)
    assert code == 0
    assert "256, 256 supervised" in out
    assert "the model has 256 positions, so samples are held to 256 tokens instead of 100000" in err


ESCAPES = "a\x1b[2J\x07\x9b31m\u202eb\r"


def test_data_that_would_drive_the_terminal_is_written_out(run: Run, llama: Path, tmp_path: Path) -> None:
    data = write_rows(
        tmp_path / "d.jsonl", [chat("Hi", ESCAPES, id=ESCAPES), {"messages": [{"role": ESCAPES}]}, {ESCAPES: 1}]
    )
    audited = run("audit", "--model", llama, "--data", data)
    captured = capture(run, llama, data, tmp_path / "out")
    shown = run("inspect", tmp_path / "out", "--sample", ESCAPES)
    missing = run("inspect", tmp_path / "out", "--sample", "no" + ESCAPES)
    assert [one[0] for one in (audited, captured, shown, missing)] == [0, 0, 0, 2]
    for text in (part for one in (audited, captured, shown, missing) for part in one[1:]):
        assert not set(text) & set("\x1b\x07\x9b\u202e")
    assert r"[[a\x1b[2J\x07\x9b31m\u202eb\x0d<|im_end|>]]" in audited[1]
    assert r"[[a\x1b[2J\x07\x9b31m\u202eb\x0d<|im_end|>]]" in shown[1]
