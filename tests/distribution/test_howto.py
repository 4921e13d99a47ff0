"""The how-to pages' commands and Python run as they stand, one after the other, on a tiny model."""

import re
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hiddentap.capture.cli import main
from hiddentap.capture.formats import FORMATS
from support import tiny
from support.model_folder import model_folder

ROOT = Path(__file__).resolve().parents[2]
PAGES = {path.name: path for path in sorted((ROOT / "docs" / "howto").glob("*.md"))}
BLOCK = re.compile(r"```(bash|python)\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"(?<!\\)\n")
TRAINERS = {
    "specforge.md": "specforge.algorithms.eagle3.data",
    "speculators.md": "speculators.train.data",
    "modelopt.md": "modelopt.torch.speculative.eagle.utils",
    "automodel-dspark.md": "nemo_automodel.components.datasets.llm.dspark_cache",
    "automodel-eagle3.md": "nemo_automodel.components.datasets.llm.eagle3_cache",
}
FOUND = {
    "hiddentap verify CLAIMED --model $MODEL": "matches boundary 2, not 3 as declared",
    "hiddentap verify UNMARKED --model $MODEL": "pre-norm",
}
"""Commands that are to end with 1, and what they are to say."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty layers, as SmolLM2 has, so that the pages' layer ids are this model's too."""
    fields = {"vocab_size": 4096, "num_hidden_layers": 30, "max_position_embeddings": 8192, "pad_token_id": None}
    return model_folder(tmp_path_factory.mktemp("howto") / "model", tiny.build_llama(**fields))


@pytest.fixture(scope="module")
def captures() -> dict[str, Path]:
    """The folder that each capture command filled: pages that begin alike capture once."""
    return {}


@pytest.fixture
def command(
    model: Path, captures: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], tuple[int, str]]:
    """Run one command of a page: hiddentap in this process, all others in their own. (exit code, what it printed)"""

    def run(text: str) -> tuple[int, str]:
        if text in captures:
            shutil.copytree(captures[text], "OUT")
            return 0, ""
        words = shlex.split(text.replace("\\\n", " ").replace("$MODEL", str(model)))
        if words[0] != "hiddentap":
            words = [sys.executable if words[0] == "python" else words[0], *words[1:]]
            done = subprocess.run(words, capture_output=True, text=True)
            return done.returncode, done.stdout + done.stderr
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            main()
        if words[1] == "capture":
            captures[text] = Path("OUT").resolve()
        return int(ended.value.code or 0), "".join(capsys.readouterr())

    return run


@pytest.fixture(autouse=True)
def quiet_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.slow
@pytest.mark.parametrize("page", [name for name in PAGES if name != "README.md"])
def test_the_blocks_of_a_page_run(
    page: str, command: Callable[[str], tuple[int, str]], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page in TRAINERS:
        pytest.importorskip(TRAINERS[page])
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"MODEL": str(model)}
    for language, block in BLOCK.findall(PAGES[page].read_text(encoding="utf-8")):
        if language == "python":
            exec(block, names)
            continue
        for text in COMMAND.split(block.strip()):
            code, printed = command(text)
            assert code == (1 if text in FOUND else 0), f"{text}\n{printed}"
            assert FOUND.get(text, "") in printed


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_somewhere(page: str) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", PAGES[page].read_text(encoding="utf-8"))
    assert [target for target in targets if not (PAGES[page].parent / target).exists()] == []


def test_there_is_a_page_for_every_layout_and_the_first_page_leads_to_each() -> None:
    first = PAGES["README.md"].read_text(encoding="utf-8")
    assert [name for name in FORMATS if f"{name}.md" not in PAGES] == []
    assert [name for name in PAGES if name != "README.md" and f"({name})" not in first] == []
