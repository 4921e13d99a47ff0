"""A model that fails in the middle of a run, and one whose values do."""

import json
import time
from pathlib import Path

from hiddentap import CapturedDataset
from support.fork_server import ForkServer
from support.model_folder import chat, write_rows

ROWS = [chat("q", "a" * (20 + i), id=f"s{i}") for i in range(12)]


def test_a_model_that_raises_at_batch_7_ends_the_run_with_its_error_within_5_seconds(
    server: ForkServer, llama: Path, tmp_path: Path
) -> None:
    data, out = write_rows(tmp_path / "rows.jsonl", ROWS), tmp_path / "out"
    command = ("capture", "--model", llama, "--data", data, "--layer-ids", "0,2", "--exact", "--shard-rows", 150)
    given = {"number": 7, "note": str(tmp_path / "raised")}
    failed = server.run(*command, "--out", out, place="error_in_forward", given=given)
    assert time.monotonic() - float((tmp_path / "raised").read_text()) < 5
    assert failed.code == 1
    assert failed.text.splitlines()[-1] == "ValueError: the kernel is bad"
    kept = {path: path.stat().st_mtime_ns for path in (out / "shards").iterdir()}
    assert kept
    assert {path.suffix for path in kept} == {".safetensors"}
    assert json.loads((out / "manifest.json").read_text())["complete"] is False

    assert server.run(*command, "--out", out).code == 0
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert len(CapturedDataset(out)) == 12
    assert server.run("verify", out, "--model", llama).code == 0


def test_a_sample_with_inf_is_told_with_its_place_and_the_rest_is_captured(
    server: ForkServer, llama: Path, tmp_path: Path
) -> None:
    data, out = write_rows(tmp_path / "rows.jsonl", ROWS), tmp_path / "out"
    command = ("capture", "--model", llama, "--data", data, "--layer-ids", "0,2", "--exact", "--out", out)
    length = 21 + 1 + 25  # chat marks, question and answer of s5, a token each byte
    ended = server.run(*command, place="inf_in_samples_of", given={"length": length})
    assert ended.code == 0
    assert "11 captured, 1 rejected" in ended.text
    assert "1 bad_values" in ended.text
    (line,) = (out / "rejects.jsonl").read_text().splitlines()
    assert (json.loads(line)["id"], json.loads(line)["line"]) == ("s5", 6)
    assert "not finite at layer 2: 1 row(s), the first at token 4" in json.loads(line)["reason"]
    assert server.run("verify", out, "--model", llama).code == 0

    again = server.run(*command)
    assert again.code == 0
    assert "11 captured, 1 rejected" in again.text
    assert (out / "rejects.jsonl").read_text().splitlines() == [line]
