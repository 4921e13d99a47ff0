"""`hiddentap export` and `hiddentap import` as a user types them."""

from pathlib import Path

import pytest

from hiddentap import CapturedDataset
from hiddentap.capture.cli.export import ALGORITHMS, LAYOUTS
from hiddentap.capture.formats import FORMATS
from support.trainer_dump import capture, make_target, write_data


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def dump(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dump")
    return capture(target, write_data(folder / "rows.jsonl"), folder / "out", (1, 3, 4))


def test_the_command_knows_every_layout_and_algorithm() -> None:
    assert tuple(FORMATS) == LAYOUTS
    assert set(ALGORITHMS) == {name for layout in FORMATS.values() for name in layout.algorithms}


def test_export_sums_up_what_was_written_and_what_was_left_out(run, dump: Path, tmp_path: Path) -> None:
    command = ("export", dump, "--to", "specforge", "--algorithm", "dflash", "--dest", tmp_path / "d")
    code, out, _ = run(*command)
    assert code == 0
    assert "samples   3, 42 tokens" in out
    assert "left out  2 with no two consecutive supervised tokens" in out
    assert "done before" not in out
    code, out, _ = run(*command)
    assert code == 0
    assert "done before  3 files" in out


def test_export_tells_how_post_norm_came_about(run, dump: Path, tmp_path: Path) -> None:
    _, _, err = run("export", dump, "--to", "deepspec", "--dest", tmp_path / "d", "--shard-size", 2)
    assert "post-norm is made from pre-norm by the model's own norm module" in err.splitlines()


def test_quiet_says_nothing(run, dump: Path, tmp_path: Path) -> None:
    assert run("export", dump, "--to", "modelopt", "--dest", tmp_path / "d", "--quiet") == (0, "", "")
    assert run("import", tmp_path / "d", "--from", "modelopt", "--out", tmp_path / "o", "--quiet") == (0, "", "")


def test_import_says_what_is_claimed(run, dump: Path, tmp_path: Path) -> None:
    run("export", dump, "--to", "deepspec", "--dest", tmp_path / "d")
    code, out, _ = run("import", tmp_path / "d", "--from", "deepspec", "--out", tmp_path / "o")
    assert code == 0
    assert "samples  5, 53 tokens" in out
    assert "claimed  boundaries 2, 4, 5, H = 32, last states: post" in out
    assert len(CapturedDataset(tmp_path / "o")) == 5
    code, out, _ = run("inspect", tmp_path / "o")
    assert code == 0
    assert "1, 3, 4 (layer_output), boundaries 2, 4, 5" in out


def test_import_takes_the_users_word_for_layers_and_model(run, dump: Path, target: Path, tmp_path: Path) -> None:
    run("export", dump, "--to", "modelopt", "--dest", tmp_path / "d")
    (tmp_path / "d/hiddentap-export.json").unlink()
    code, out, _ = run(
        "import", tmp_path / "d", "--from", "modelopt", "--out", tmp_path / "o", "--model", target, "--layer-ids", "2,4,5",
        "--convention", "boundary",
    )  # fmt: skip
    assert code == 0
    assert "boundaries 2, 4, 5" in out


WRONG_USE = [
    (["export", "{dump}", "--dest", "{new}"], "Missing option '--to'"),
    (["export", "{dump}", "--to", "nobody", "--dest", "{new}"], "Invalid value"),
    (["export", "{new}", "--to", "deepspec", "--dest", "{new}"], "is no manifest of this format"),
    (["export", "{dump}", "--to", "specforge", "--dest", "{new}"], "give --algorithm eagle3 or dflash or domino or dspark"),
    (["export", "{dump}", "--to", "deepspec", "--dest", "{new}", "--seq-length", "9"], "--seq-length means nothing to deepspec"),
    (["export", "{dump}", "--to", "deepspec", "--dest", "{dump}"], "is not empty and holds no export of ours"),
    (["import", "{new}", "--from", "modelopt", "--out", "{new}"], "holds no .pt file"),
    (["import", "{dump}", "--from", "modelopt"], "Missing option '--out'"),
    (["import", "{dump}", "--from", "modelopt", "--out", "{new}", "--layer-ids", "x", "--n", "8"], "holds no .pt file"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "text"), WRONG_USE, ids=[" ".join(a) for a, _ in WRONG_USE])
def test_wrong_use_is_told_and_leaves_nothing(run, dump: Path, tmp_path: Path, arguments: list[str], text: str) -> None:
    code, out, err = run(*(a.format(dump=dump, new=tmp_path / "new") for a in arguments))
    assert code in (1, 2)
    assert out == ""
    assert err.startswith("hiddentap: ")
    assert text in err
    assert not (tmp_path / "new").exists()


def test_layer_ids_that_are_no_integers_are_named(run, dump: Path, tmp_path: Path) -> None:
    run("export", dump, "--to", "modelopt", "--dest", tmp_path / "d")
    code, _, err = run("import", tmp_path / "d", "--from", "modelopt", "--out", tmp_path / "o", "--layer-ids", "1,x")
    assert code == 2
    assert "must be plain integers; got 'x'" in err


def test_verify_names_the_layers_of_a_dump_whose_ids_are_off_by_one(
    run, dump: Path, target: Path, tmp_path: Path
) -> None:
    run("export", dump, "--to", "modelopt", "--dest", tmp_path / "d")
    for record in ("hiddentap-export.json", "hiddentap-samples.jsonl"):
        (tmp_path / "d" / record).unlink()
    right = ("import", tmp_path / "d", "--from", "modelopt", "--model", target)
    run(*right, "--layer-ids", "1,3,4", "--out", tmp_path / "right")
    run(*right, "--layer-ids", "2,4,5", "--out", tmp_path / "wrong")
    code, out, _ = run("verify", tmp_path / "right", "--model", target)
    assert code == 0, out
    code, out, _ = run("verify", tmp_path / "wrong", "--model", target)
    assert code == 1
    for held, claimed in ((2, 3), (4, 5), (5, 6)):
        assert f"matches boundary {held}, not {claimed} as declared" in out
