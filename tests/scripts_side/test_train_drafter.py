"""The script as a person runs it, on a tiny target, and what transformers makes of its result."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM

SCRIPTS = Path(__file__).parents[2] / "scripts"
OPTIONS = ("--layers", "1", "--block-size", "4", "--pack-tokens", "200", "--anchors", "8", "--lr", "2e-2")


def run(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPTS / script, *arguments], capture_output=True, text=True)


def train(out: Path, dest: Path, *more: str) -> subprocess.CompletedProcess[str]:
    done = run("train_drafter.py", out, "--dest", dest, *OPTIONS, *more)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, out: Path) -> Path:
    pytest.importorskip("matplotlib")
    dest = tmp_path_factory.mktemp("drafter") / "trained"
    train(out, dest, "--steps", "50")
    return dest


@pytest.mark.slow
def test_the_loss_falls_and_a_curve_is_drawn(trained: Path) -> None:
    history = json.loads((trained / "training" / "state.json").read_text())["history"]
    (first, at_first), (last, at_last) = history["loss"][0], history["loss"][-1]
    assert (first, last) == (25, 50)
    assert at_last < at_first - 0.1
    assert (trained / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_result_runs_in_transformers_and_changes_no_greedy_output(trained: Path, target: Path) -> None:
    drafter = AutoModel.from_pretrained(trained).eval()
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    assert drafter.config.target_layer_ids == [0, 2, 4]
    prompt = torch.tensor([[8, 9, 10, 11, 12]])
    settings = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": 12}
    plain = model.generate(prompt, **settings)
    assert torch.equal(plain, model.generate(prompt, assistant_model=drafter, speculation_type="dflash", **settings))


@pytest.mark.slow
def test_the_served_projection_takes_states_as_large_as_they_are(trained: Path) -> None:
    """Training divides each channel by its median size; what is saved must not need that."""
    served = load_file(trained / "model.safetensors")["encoder.fc.weight"]
    raw = load_file(trained / "training" / "state.safetensors")["model.encoder.fc.weight"]
    ratio = raw / served
    assert torch.allclose(ratio, ratio[:1].expand_as(ratio), rtol=1e-4)
    assert ratio[0].std() > 0.01


@pytest.mark.slow
def test_a_stopped_training_goes_on_to_the_same_weights(tmp_path: Path, trained: Path, out: Path) -> None:
    """Stopped by a limit on what was saved: the checkpoint of step 20, with the later ones lost."""
    pytest.importorskip("matplotlib")
    code = (
        "import sys, train_drafter as t\n"
        "save = t.Training.save\n"
        "def save_and_stop(self, dest):\n"
        "    save(self, dest)\n"
        "    sys.exit(9)\n"
        "t.Training.save = save_and_stop\n"
        "t.main()\n"
    )
    arguments = [out, "--dest", tmp_path / "d", *OPTIONS, "--steps", "50", "--save-every", "20"]
    stopped = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=SCRIPTS, capture_output=True, text=True
    )
    assert stopped.returncode == 9, stopped.stderr
    assert json.loads((tmp_path / "d" / "training" / "state.json").read_text())["done"] == 20
    train(out, tmp_path / "d", "--steps", "50", "--resume")
    expected, found = (load_file(folder / "model.safetensors") for folder in (trained, tmp_path / "d"))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.slow
def test_a_training_is_not_overwritten_nor_resumed_with_other_options(tmp_path: Path, trained: Path, out: Path) -> None:
    shutil.copytree(trained, tmp_path / "d")
    again = run("train_drafter.py", out, "--dest", tmp_path / "d", *OPTIONS, "--steps", "50")
    assert again.returncode == 1
    assert "holds a training; go on with it (--resume)" in again.stderr
    other = run("train_drafter.py", out, "--dest", tmp_path / "d", *OPTIONS, "--steps", "60", "--resume")
    assert other.returncode == 1
    assert "resume it with the same options" in other.stderr


@pytest.mark.slow
def test_evaluation_says_tokens_per_step_and_equal_outputs(tmp_path: Path, trained: Path, target: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"messages": [{"role": "user", "content": c}]}) + "\n" for c in "abc"))
    done = run(
        "evaluate_drafter.py", "--model", target, "--drafter", trained, "--prompts", prompts, "--max-new-tokens", "8",
        "--limit", "2", "--compare", "--processes", "2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    counted, differences = done.stdout.splitlines()[:4], done.stdout.splitlines()[4:]
    ways = ["as trained", "layers -1", "layers +1", "untrained"]
    assert [line.split(":")[0] for line in counted] == [f"trained {way}" for way in ways]
    assert all("output equal to plain greedy 2 of 2 times" in line for line in counted)
    assert [line.split(":")[0] for line in differences] == [f"trained as trained less {way}" for way in ways[1:]]
