"""`--json`: one object on standard output with the documented keys, everything else on standard error."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.captured import captured
from support.model_folder import CHATS, llama_folder, write_rows
from support.trainer_dump import capture, make_target, write_data

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/reference/json.md"
Run = Callable[..., tuple[int, str, str]]


def documented_keys(command: str) -> set[str]:
    """The keys that the document's tables list for a command."""
    section = DOCUMENT.read_text(encoding="utf-8").split(f"\n## `{command}`\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {key for row in rows for key in re.findall(r"`(\w+)`", row)}


def json_of(result: tuple[int, str, str], command: str, *, code: int = 0) -> dict[str, Any]:
    """The one object of a command's standard output; it has the keys that the document promises."""
    ended, out, _ = result
    assert ended == code
    assert len(out.splitlines()) == 1
    values: dict[str, Any] = json.loads(out)
    promised = documented_keys(command)
    assert promised
    assert promised - values.keys() == set()
    return values


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six conversations in two shards."""
    return captured(llama_folder(tmp_path_factory.mktemp("llama")), tmp_path_factory.mktemp("good") / "out")


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("dump")
    return capture(make_target(place / "target"), write_data(place / "rows.jsonl"), place / "out", (1, 3, 4))


def test_capture_and_its_dry_run(run: Run, llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "d.jsonl", [*CHATS, {"foo": 1}])
    command = ("capture", "--model", llama, "--data", data, "--layer-ids", "0,2", "--out", tmp_path / "out", "--json")
    planned = json_of(run(*command, "--dry-run"), "capture --dry-run")
    assert planned["fits"] is True
    assert planned["audit"]["captured"] == 5
    result = run(*command)
    values = json_of(result, "capture")
    assert values["out"] == str(tmp_path / "out")
    assert (values["captured"], values["rejected_by_code"]) == (5, {"no_known_field": 1})
    assert (values["layer_ids"], values["hidden_size"]) == ([0, 2], 32)
    assert values["tokens"] == planned["audit"]["tokens"]
    assert "capturing: 5 of 5 samples" in result[2]


def test_quiet_silences_the_progress_alone(run: Run, llama: Path, data: Path, tmp_path: Path) -> None:
    result = run(
        "capture", "--model", llama, "--data", data, "--layer-ids", "1", "--out", tmp_path / "o", "--json", "--quiet"
    )
    assert json_of(result, "capture")["captured"] == 5
    assert result[2] == ""


def test_generate(run: Run, llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "d.jsonl", [{"text": "Once upon"}, {"foo": 1}])
    command = ("generate", "--model", llama, "--data", data, "--layer-ids", "1", "--out", tmp_path / "out")
    values = json_of(run(*command, "--max-new-tokens", 3, "--ignore-eos", "--json"), "generate")
    assert (values["new_tokens"], values["finish_reasons"]) == (3, {"length": 1})
    assert json_of(run("inspect", tmp_path / "out", "--json"), "inspect")["finish_reasons"] == {"length": 1}


def test_generate_all_turns(run: Run, llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "d.jsonl", [{"text": "Once upon"}, {"foo": 1}])
    command = ("generate", "--model", llama, "--data", data, "--layer-ids", "1", "--out", tmp_path / "out")
    options = ("--turns", "all", "--max-new-tokens", 3, "--ignore-eos", "--json")
    values = json_of(run(*command, *options), "generate --turns all")
    assert (values["new_tokens"], values["finish_reasons"]) == (3, {"length": 1})
    assert values["messages"] == str(tmp_path / "out/answers/messages.jsonl")
    assert (values["capture"]["captured"], values["capture"]["rejected"]) == (1, 1)


def test_audit(run: Run, llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "d.jsonl", [{"foo": 1}, CHATS[1]])
    values = json_of(run("audit", "--model", llama, "--data", data, "--json"), "audit")
    assert values["first_reject"]["no_known_field"]["line"] == 1
    assert values["sample"]["line"] == 2
    assert ["No.<|im_end|>", True] in values["sample"]["pieces"]


def test_layers(run: Run, tmp_path: Path) -> None:
    twelve = json_of(run("layers", llama_folder(tmp_path / "m", num_hidden_layers=12), "--json"), "layers")
    assert (twelve["n"], twelve["layers_path"], twelve["hidden_sizes"]) == (12, "model.layers", [32])
    assert twelve["default_ids"]["eagle3"] == {"layer_output": [1, 5, 8], "boundary": [2, 6, 9]}
    assert twelve["systems"]["speculators"]["eagle3"] == [2, 6, 9]
    assert (twelve["same_as"], twelve["generation"]) == (None, None)
    named = run("layers", llama_folder(tmp_path / "n", num_hidden_layers=12), "--json", "--layer-ids", "0,11")
    assert json_of(named, "layers")["same_as"]["speculators"] == [1, 12]
    few = json_of(run("layers", llama_folder(tmp_path / "few", num_hidden_layers=2), "--json"), "layers")
    assert few["default_ids"]["eagle3"] is None


def test_inspect_and_one_of_its_samples(run: Run, folder: Path) -> None:
    values = json_of(run("inspect", folder, "--json"), "inspect")
    assert (values["shards"], values["samples"], values["complete"]) == (2, 6, True)
    assert values["columns"]["aux_hidden_states"] == {"shape": [3, 32], "dtype": "float32"}
    assert values["finish_reasons"] is None
    assert values["metadata"]["taps"]["hidden_size"] == 32
    sample = json_of(run("inspect", folder, "--sample", "s2", "--json"), "inspect --sample")
    assert sample["states"] == ["layer 0", "layer 1", "layer 3", "pre-norm", "post-norm"]
    assert len(sample["ids"]) == len(sample["norms"]) == len(sample["supervised"])


def test_verify_of_a_good_and_of_a_damaged_folder(run: Run, folder: Path, tmp_path: Path) -> None:
    values = json_of(run("verify", folder, "--json", "--samples", 1), "verify")
    assert (values["ok"], values["findings"], values["compared"]) == (True, [], 1)
    broken = tmp_path / "out"
    (broken / "shards").mkdir(parents=True)
    (broken / "shards/shard-000000.safetensors").write_bytes(b"")
    found = json_of(run("verify", broken, "--json"), "verify", code=1)
    assert found["ok"] is False
    assert {finding["severity"] for finding in found["findings"]} >= {"error"}


def test_report(run: Run, folder: Path, tmp_path: Path) -> None:
    values = json_of(run("report", folder, "--html", tmp_path / "r.html", "--json"), "report")
    assert values == {"headline": "Nothing unusual.", "notices": [], "html": str(tmp_path / "r.html"), "pngs": []}


def test_export_and_import(run: Run, dump: Path, tmp_path: Path) -> None:
    to = tmp_path / "d"
    written = json_of(
        run("export", dump, "--to", "specforge", "--algorithm", "dflash", "--dest", to, "--json"), "export"
    )
    assert (written["samples"], written["tokens"]) == (3, 42)
    assert written["left_out"] == {"no two consecutive supervised tokens": 2}
    run("export", dump, "--to", "deepspec", "--dest", tmp_path / "e", "--quiet")
    read = json_of(run("import", tmp_path / "e", "--from", "deepspec", "--out", tmp_path / "o", "--json"), "import")
    assert (read["captured"], read["boundaries"], read["final"]) == (5, [2, 4, 5], "post")


def test_a_failure_leaves_standard_output_empty(run: Run, tmp_path: Path) -> None:
    code, out, err = run("inspect", tmp_path / "nowhere", "--json")
    assert (code, out) == (2, "")
    assert err.startswith("hiddentap: ")


def test_numbers_that_are_not_finite_are_null() -> None:
    from hiddentap.capture.cli.output import json_value

    assert json_value({"a": [float("nan"), 1.5, float("inf")], 1: Path("x")}) == {"a": [None, 1.5, None], "1": "x"}


CHATTY = """
import os, subprocess, sys
from hiddentap.capture.cli import main
from hiddentap.models import loading

quiet = loading.model_skeleton

def chatty(*args):
    print("a banner")
    os.write(1, b"a banner of a library in C\\n")
    subprocess.run(["echo", "a banner of a process"])
    return quiet(*args)

loading.model_skeleton = chatty
sys.argv = ["hiddentap", "layers", {model!r}, "--json"]
main()
"""


def test_what_libraries_print_does_not_reach_standard_output(tmp_path: Path) -> None:
    script = CHATTY.format(model=str(llama_folder(tmp_path / "model")))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["model"] == "LlamaForCausalLM"
    for banner in ("a banner\n", "a banner of a library in C\n", "a banner of a process\n"):
        assert banner in done.stderr
