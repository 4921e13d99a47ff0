"""What is installed beside the package: a trainer's environment reads, an empty one with the dependencies captures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.bare_environment import closure, link_packages, make_environment
from support.captured import captured
from support.model_folder import llama_folder, write_rows
from support.source_copy import copy_source

READ = """
import json, sys
from hiddentap import CapturedDataset, PackedDataset, PackLoader, Shard, inspect_capture

out = sys.argv[1]
dataset = CapturedDataset(out)
packs = PackLoader(PackedDataset(dataset, 16))
told = {
    "ids": dataset[1]["input_ids"].tolist(),
    "batch": list(dataset.collate([dataset[0], dataset[1]])["aux_hidden_states"].shape),
    "packs": len(packs),
    "rows": sum(len(pack["input_ids"]) for pack in packs),
    "inspected": inspect_capture(out)["rows"],
}
for name in ("transformers", "click", "rich"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise SystemExit(f"{name} is here, so this shows nothing")
print(json.dumps(told))
"""
POST_NORM = "import sys, hiddentap; hiddentap.PostNorm(hiddentap.CapturedDataset(sys.argv[1]))"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("read")
    rows = write_rows(folder / "rows.jsonl", [{"id": f"s{i}", "input_ids": [10 + i] * (3 + i)} for i in range(5)])
    return captured(llama_folder(folder / "model"), folder / "out", data=rows, layer_ids=(0, 2), head=True)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of modules: torch, numpy and safetensors with what they need, and this package."""
    folder = tmp_path_factory.mktemp("reader") / "packages"
    folder.mkdir()
    link_packages(folder, "torch", "numpy", "safetensors")
    copy_source(folder / "hiddentap")
    return folder


def run_reader(reader: Path, code: str, out: Path) -> subprocess.CompletedProcess[str]:
    # -S: without the site-packages of the interpreter that runs the tests.
    command = [sys.executable, "-S", "-c", code, str(out)]
    return subprocess.run(command, env={"PYTHONPATH": str(reader)}, capture_output=True, text=True)


def test_torch_numpy_and_safetensors_alone_read_pack_and_inspect(reader: Path, out: Path) -> None:
    done = run_reader(reader, READ, out)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told == {"ids": [11] * 4, "batch": [2, 4, 2, 32], "packs": 2, "rows": 25, "inspected": 25}


def test_post_norm_without_transformers_says_what_is_missing(reader: Path, out: Path) -> None:
    done = run_reader(reader, POST_NORM, out)
    assert done.returncode == 1
    assert (
        "needs the package transformers; install hiddentap with its dependencies, or capture with --final both"
        in done.stderr
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of a new virtual environment: the dependencies linked into it, the wheel installed by its own pip."""
    folder = tmp_path_factory.mktemp("environment")
    source, wheels = copy_source(folder / "source" / "x-y"), folder / "wheels"
    python = make_environment(folder / "env", *(name for name in closure("hiddentap") if name != "hiddentap"))
    pip = ["-m", "pip", "--disable-pip-version-check"]
    must(
        sys.executable, *pip, "wheel", source, "--wheel-dir", wheels, "--no-deps", "--no-index", "--no-build-isolation"
    )
    # With its dependencies: pip refuses here what the metadata asks for and the environment does not hold.
    must(python, *pip, "install", "--no-index", "--find-links", wheels, "hiddentap")
    must(python, *pip, "check")
    return python.parent


def must(*command: object) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_in_an_empty_environment_captures_verifies_and_reads(installed: Path, tmp_path: Path) -> None:
    model = llama_folder(tmp_path / "model")
    rows = write_rows(tmp_path / "rows.jsonl", [{"id": "a", "input_ids": [1, 2, 3, 4, 5]}])
    command = installed / "hiddentap"
    must(
        command, "capture", "--model", model, "--data", rows, "--layer-ids", "0,2", "--head", "--out", tmp_path / "out"
    )
    assert "OK: no problems found" in must(command, "verify", tmp_path / "out", "--model", model)
    code = (
        "import sys, hiddentap as h; print(h.__file__); print(h.CapturedDataset(sys.argv[1])[0]['input_ids'].tolist())"
    )
    file, ids = must(installed / "python", "-c", code, tmp_path / "out").splitlines()
    assert Path(file).is_relative_to(installed.parent)
    assert ids == "[1, 2, 3, 4, 5]"
