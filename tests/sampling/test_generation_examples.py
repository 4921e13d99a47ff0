"""The example of the documentation and the on-policy script run, and say what they promise."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hiddentap import CapturedDataset
from support import tiny
from support.model_folder import VOCAB, model_folder

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.smollm2
@pytest.mark.slow
def test_the_example_runs_and_replays_what_was_sampled(
    smollm2_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [example] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/generation.md").read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"MODEL": str(smollm2_folder)}
    exec(example, names)
    assert len(CapturedDataset(tmp_path / "OUT")) == 2
    difference = names["replayed"] - names["result"].rows["sampling_logprobs"][names["written"]]  # type: ignore[operator,attr-defined]
    assert float(difference.abs().max()) < 1e-4


@pytest.mark.slow
def test_the_on_policy_script_starts_each_update_at_the_distribution_it_sampled_from(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", tiny.build_llama(vocab_size=VOCAB, pad_token_id=None))
    command = [sys.executable, str(ROOT / "scripts/on_policy.py"), "--model", str(folder), "--steps", "2"]
    done = subprocess.run([*command, "--max-new-tokens", "8"], capture_output=True, text=True, check=True)
    found = re.findall(r"replayed (\S+), full vocabulary (\S+)", done.stdout)
    assert len(found) == 2
    for replayed, full in found:
        assert float(replayed) < 1e-4
        assert float(full) > 0.01
