"""`hiddentap verify` as a user types it."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from hiddentap import Shard
from support.captured import captured
from support.damage import Columns, rewrite


@pytest.fixture(scope="module")
def good(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return captured(llama, tmp_path_factory.mktemp("good") / "out", exact=True)


@pytest.fixture
def run(run: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, str, str]]:
    """`hiddentap verify` in this process: (exit code, standard output, standard error)."""
    return partial(run, "verify")


def test_a_good_folder_is_code_0_and_says_what_was_compared(run, good: Path) -> None:
    code, out, err = run(good)
    assert code == 0
    assert [line.split(",")[0].split(" ", 2)[2] for line in err.splitlines()] == [
        "checking files: 2 of 2 shards", "checking values: 2 of 2 shards", "comparing with the model: 6 of 6 samples",
    ]  # fmt: skip
    assert "compared   6 samples with plain forwards" in out
    assert "layer 1    boundary 2: all rows bit-equal, row error median 0.0e+00, largest 0.0e+00; allowed: none" in out
    assert out.splitlines()[-1] == "OK: no problems found; 6 of 6 samples were compared with a model"


def test_a_damaged_folder_is_code_1_and_says_where_and_what(run, good: Path, llama: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(good, tmp_path / "out"))

    def swap(columns: Columns) -> None:
        columns["aux_hidden_states"] = columns["aux_hidden_states"][:, [1, 0, 2]].contiguous()

    rewrite(folder, swap, index=1)
    code, out, _ = run(folder, "--model", llama, "--samples", 2)
    assert code == 1
    lines = out.splitlines()
    assert any(
        line.startswith("error: shards/shard-000001.safetensors: sample 's")
        and line.endswith("aux_hidden_states: stored layer 0 matches boundary 2, not 1 as declared")
        for line in lines
    )
    assert lines[-1] == "2 problems found; 2 of 6 samples were compared with a model"


def test_without_a_model_it_says_that_nothing_was_compared(run, good: Path) -> None:
    code, out, _ = run(good, "--model", "none")
    assert (code, out.splitlines()[-1]) == (0, "OK: no problems found; no sample was compared with a model")


def test_repair_says_what_it_removed(run, good: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(good, tmp_path / "out"))
    rewrite(folder, lambda columns: columns["pre_norm"].mul_(-1), index=0)
    code, out, _ = run(folder, "--repair")
    assert code == 1
    assert "removed    shard-000000.safetensors: the same capture command makes it again" in out
    assert not (folder / "shards/shard-000000.safetensors").exists()


def test_no_model_is_asked_for_by_none(run, good: Path) -> None:
    code, out, _ = run(good, "--model", "none")
    assert code == 0
    assert "no sample was compared with a model: not asked for" in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["{nowhere}"], "is not there; expected the folder of a capture"),
        (["{file}"], "is a file; expected the folder of a capture"),
        (["{empty}"], "holds no captured shards"),
        (["{good}", "--model", "{nowhere}"], "cannot be loaded as a model"),
        (["{good}", "--samples", "-1"], "Invalid value"),
        ([], "Missing argument 'OUT'"),
    ],
)
def test_wrong_use_is_one_line_and_code_2(run, good: Path, tmp_path: Path, arguments: list[str], text: str) -> None:
    places = {"good": good, "nowhere": tmp_path / "nowhere", "empty": tmp_path / "empty", "file": tmp_path / "file"}
    places["empty"].mkdir()
    places["file"].write_text("text")
    code, out, err = run(*(argument.format(**places) for argument in arguments))
    assert (code, out) == (2, "")
    *progress, last = err.splitlines()
    assert not any(line.startswith("hiddentap: ") for line in progress)
    assert text in last


def test_quiet_prints_the_problems_alone(run, good: Path, tmp_path: Path) -> None:
    assert run(good, "--quiet") == (0, "", "")
    folder = Path(shutil.copytree(good, tmp_path / "out"))
    rewrite(folder, lambda columns: columns["pre_norm"].mul_(-1), index=0)
    code, out, err = run(folder, "--quiet")
    assert (code, err) == (1, "")
    assert len(out.splitlines()) >= 1
    assert all(line.startswith("error: shards/shard-000000.safetensors: ") for line in out.splitlines())


def test_the_model_is_found_from_another_working_directory(
    run, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(llama.parent)
    folder = captured(llama.name, tmp_path / "out", exact=True)
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(folder)
    assert (code, out.splitlines()[-1]) == (0, "OK: no problems found; 6 of 6 samples were compared with a model")
    assert Shard(folder / "shards/shard-000000.safetensors").metadata["model"]["id"] == str(llama)


def test_a_comparison_with_a_model_can_be_required(run, good: Path, llama: Path, tmp_path: Path) -> None:
    assert run(good, "--require-model", "--quiet")[0] == 0
    moved = Path(shutil.copytree(llama, tmp_path / "model"))
    folder = captured(moved, tmp_path / "out")
    shutil.rmtree(moved)
    assert run(folder, "--quiet")[0] == 0
    code, out, _ = run(folder, "--require-model", "--quiet")
    assert code == 1
    assert f"no sample was compared with a model: {moved} is not on this machine; name its place with --model" in out
    for useless in (["--samples", 0], ["--model", "none"]):
        code, _, err = run(folder, "--require-model", *useless)
        assert code == 2
        assert "require_model asks for a comparison with a model" in err


def test_the_limit_that_was_allowed_is_said(run, llama: Path, tmp_path: Path) -> None:
    _, out, _ = run(captured(llama, tmp_path / "a"))
    assert "; allowed: 1e-05" in out
    _, out, _ = run(captured(llama, tmp_path / "b", store_dtype="bf16"))
    assert "; allowed: 0.001" in out
