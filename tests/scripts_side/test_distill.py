"""What the student learns from, by hand, and the script as a person runs it."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training.student import Student, answered_rows, own_past, state_distance, student_config, top_k_divergence
from transformers import AutoConfig, AutoModelForCausalLM

from support.captured import captured

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_the_divergence_counts_all_tokens_that_were_not_stored_as_one() -> None:
    theirs, ours = [0.5, 0.25, 0.15, 0.1], [0.2, 0.2, 0.5, 0.1]
    top = {
        "topk_logits": torch.tensor([[math.log(0.5), math.log(0.25)]]) + 3,
        "topk_ids": torch.tensor([[0, 1]], dtype=torch.int32),
        "topk_logsumexp": torch.tensor([3.0]),
    }
    pairs = [(theirs[0], ours[0]), (theirs[1], ours[1]), (theirs[2] + theirs[3], ours[2] + ours[3])]
    expected = sum(p * math.log(p / q) for p, q in pairs)
    assert float(top_k_divergence(torch.tensor([ours]).log() + 7, top)) == pytest.approx(expected, rel=1e-5)


def test_a_student_that_agrees_diverges_by_nothing() -> None:
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(0))
    values, ids = logits.topk(4)
    top = {"topk_logits": values, "topk_ids": ids.int(), "topk_logsumexp": logits.logsumexp(-1)}
    assert float(top_k_divergence(logits, top)) == pytest.approx(0.0, abs=1e-6)


def test_states_are_compared_at_unit_size_without_first_rows() -> None:
    captured = torch.tensor([[[900.0, 900.0]], [[3.0, 8.0]]])
    pack = {"aux_hidden_states": captured, "position_ids": torch.tensor([0, 1])}
    scale, states = torch.tensor([1.0, 2.0]), torch.tensor([[[0.0, 0.0]], [[0.0, 1.0]]])
    size = math.sqrt((3**2 + 4**2) / 2)
    assert float(state_distance(states, pack, scale)) == pytest.approx(
        ((3 / size) ** 2 + (4 / size - 1) ** 2) / 2, rel=1e-5
    )


def test_rows_see_their_own_sample_up_to_themselves() -> None:
    seen = own_past(torch.tensor([0, 0, 1, 1]))[0, 0] == 0
    assert seen.tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [False, False, True, False],
        [False, False, True, True],
    ]


def test_answered_rows_come_before_a_supervised_token_of_their_sample() -> None:
    pack = {"segment_ids": torch.tensor([0, 0, 0, 1, 1]), "loss_mask": torch.tensor([0, 0, 1, 1, 1])}
    assert answered_rows(pack).tolist() == [1, 3]


def test_a_sample_gives_the_same_logits_alone_and_in_a_pack(target: Path) -> None:
    torch.manual_seed(0)
    student = Student(student_config(AutoConfig.from_pretrained(target), 32, 2), taps=3, target_width=32).eval()
    ids = torch.tensor([10, 11, 12, 40, 41])
    segments, positions = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 1, 2, 0, 1])
    with torch.no_grad():
        pack = {"input_ids": ids, "segment_ids": segments, "position_ids": positions}
        logits, states = student(pack, torch.tensor([3, 4]))
        alone = student.model(ids[None, 3:], use_cache=False).logits[0]
    torch.testing.assert_close(logits, alone, atol=1e-5, rtol=0)
    assert states.shape == (5, 3, 32)


@pytest.mark.slow
def test_the_script_trains_two_students_of_each_seed_and_measures_all(tmp_path: Path, out: Path) -> None:
    pytest.importorskip("matplotlib")
    options = ("--hidden-size", "32", "--layers", "2", "--pack-tokens", "200", "--steps", "12", "--evaluate-every", "4")
    command = [sys.executable, SCRIPTS / "distill.py", out, "--held-out", out, "--dest", tmp_path / "d", *options]
    done = subprocess.run([*command, "--seed", "0", "--seed", "3"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    names = ["distributions"] * 6 + ["distributions-and-states"] * 6
    assert [line.split("  ")[0].strip() for line in lines[:12]] == names
    perplexities = [float(line.split("perplexity ")[1].split()[0]) for line in lines]
    assert perplexities[2] != perplexities[5]
    for first in (0, 3, 6, 9):
        assert perplexities[first + 2] < perplexities[first]
    assert perplexities[12] == pytest.approx((perplexities[2] + perplexities[5]) / 2, abs=0.1)
    assert perplexities[13] == pytest.approx((perplexities[8] + perplexities[11]) / 2, abs=0.1)
    assert (tmp_path / "d" / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "d/seed-0/distributions/config.json").read_text())["hidden_size"] == 32
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "d/seed-3/distributions-and-states")
    assert student.config.num_hidden_layers == 2


def test_a_capture_without_top_logits_is_refused(tmp_path: Path, target: Path) -> None:
    pytest.importorskip("matplotlib")
    bare = captured(target, tmp_path / "bare", head=True)
    command = [sys.executable, SCRIPTS / "distill.py", bare, "--held-out", bare, "--dest", tmp_path / "d"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "lacks topk_ids, topk_logits, topk_logsumexp" in done.stderr
