"""Every public name has an `Example:` in its docstring, and every example of the package gives what it shows."""

import ast
import copy
import doctest
import inspect
import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hiddentap
from support.model_folder import CHATS, llama_folder, write_rows

ROOT = Path(__file__).resolve().parents[2]
PROMPT = ">>> "


def documented(source: Path) -> Iterator[tuple[str, str, int]]:
    """Name, docstring and line of everything in `source` whose docstring has an example."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.Module):
            text = ast.get_docstring(node)
            if text and PROMPT in text:
                yield getattr(node, "name", source.stem), text, node.body[0].lineno


def examples() -> list[tuple[Path, str, str, int]]:
    """Every example of the package."""
    sources = [
        ROOT / "__init__.py",
        *(path for top in ("capture", "hooks", "models") for path in (ROOT / top).rglob("*.py")),
    ]
    return [(source, *found) for source in sorted(sources) for found in documented(source)]


def docstrings(name: str) -> list[str]:
    """The docstrings of a public name and of its own public methods."""
    found = inspect.unwrap(getattr(hiddentap, name))
    methods = [value for key, value in vars(found).items() if key[0] != "_"] if inspect.isclass(found) else []
    return [inspect.getdoc(one) or "" for one in (found, *methods)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what examples name: MODEL, chats.jsonl, and OUT, a capture of both."""
    place = tmp_path_factory.mktemp("examples")
    model, data = llama_folder(place / "MODEL"), write_rows(place / "chats.jsonl", CHATS)
    hiddentap.capture_dataset(
        hiddentap.CaptureSettings(str(model), (str(data),), place / "OUT", layer_ids=(0, 1, 2), head=True, exact=True)
    )
    return place


@pytest.fixture(scope="module")
def loaded(made: Path) -> dict[str, object]:
    """What an example may use without an import."""
    model = AutoModelForCausalLM.from_pretrained(made / "MODEL").eval()
    public = {name: getattr(hiddentap, name) for name in hiddentap.__all__}
    return {**public, "torch": torch, "model": model, "tokenizer": AutoTokenizer.from_pretrained(made / "MODEL")}


@pytest.fixture
def names(made: Path, loaded: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The same with a model and a working directory of this example's own."""
    monkeypatch.chdir(shutil.copytree(made, tmp_path / "here"))
    return {**loaded, "model": copy.deepcopy(loaded["model"])}


@pytest.mark.parametrize("name", hiddentap.__all__)
def test_every_public_name_has_an_example(name: str) -> None:
    assert [text for text in docstrings(name) if "Example:\n" in text and PROMPT in text]


@pytest.mark.parametrize(
    ("source", "name", "text", "line"), [pytest.param(*found, id=f"{found[0].stem}-{found[1]}") for found in examples()]
)
def test_an_example_gives_what_it_shows(
    source: Path, name: str, text: str, line: int, names: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    module = ".".join(("hiddentap", *source.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    # Whoever copies the example of a public name has the public names alone.
    known = names if name in hiddentap.__all__ else names | vars(import_module(module))
    shown = doctest.DocTestParser().get_doctest(text, known, name, str(source), line)
    assert [one.source for one in shown.examples if one.options.get(doctest.SKIP)] == []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(shown)
    assert result.attempted > 0
    assert result.failed == 0, capsys.readouterr().out
