"""The README's Python examples run as they stand, one after the other, on a real model."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.smollm2
@pytest.mark.slow
def test_the_examples_run(smollm2_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"MODEL": str(smollm2_folder)}
    for example in examples():
        exec(example, names)
    assert len(names["dataset"]) == 7
    assert names["captured"].output is None
    assert float((names["replayed"] - names["result"].rows["sampling_logprobs"][names["sampled"]]).abs().max()) < 1e-4
    assert tuple(names["states"].shape[1:]) == (3, 576)


def test_the_readme_has_its_examples_and_every_link_leads_somewhere() -> None:
    assert len(examples()) >= 4
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#:]+)\)", text)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []
