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
    told = [
        line
        for line in err.splitlines()
        if line.endswith(" post-norm is made from pre-norm by the model's own norm module")
    ]
    assert len(told) == 1


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
    (["export", "{dump}", "--dest", "{new}"], "Missing option '--to'. Choose from: specforge, speculators, deepspec,"),
    (["export", "{dump}", "--to", "nobody", "--dest", "{new}"], "Invalid value"),
    (["export", "{new}", "--to", "deepspec", "--dest", "{new}"], "is not there; expected the folder of a capture"),
    (["export", "{empty}", "--to", "deepspec", "--dest", "{new}"], "holds no captured shards"),
    (["export", "{file}", "--to", "deepspec", "--dest", "{new}"], "is a file; expected the folder of a capture"),
    (["export", "{dump}", "--to", "deepspec", "--dest", "{file}/x"], "/file/x cannot be made, because "),
    (["export", "{dump}", "--to", "specforge", "--dest", "{new}"], "give --algorithm eagle3 or dflash or domino or dspark"),
    (["export", "{dump}", "--to", "deepspec", "--dest", "{new}", "--seq-length", "9"], "--seq-length means nothing to deepspec"),
    (["export", "{dump}", "--to", "deepspec", "--dest", "{dump}"], "is not empty and holds no export of ours"),
    (["import", "{new}", "--from", "modelopt", "--out", "{new}"], "is not there; expected a folder of modelopt files"),
    (["import", "{file}", "--from", "modelopt", "--out", "{new}"], "is a file; expected a folder of modelopt files"),
    (["import", "{dump}", "--out", "{new}"], "Missing option '--from'. Choose from: specforge, speculators, deepspec,"),
    (["import", "{dump}", "--from", "modelopt"], "Missing option '--out'"),
    (
        ["import", "{dump}", "--from", "modelopt", "--out", "{new}", "--layer-ids", "x", "--n", "8"],
        "must be plain integers; got 'x'",
    ),
]  # fmt: skip
OTHER_FILES = [
    (["import", "{empty}", "--from", "modelopt"], "holds no .pt file"),
    (["import", "{dump}", "--from", "modelopt", "--n", "8"], "holds no .pt file"),
    (["import", "{empty}", "--from", "deepspec"], "is no DeepSpec cache: it holds no manifest.json."),
    (["import", "{empty}", "--from", "automodel-dspark"], "is no Automodel cache: it holds no manifest.json."),
]


@pytest.fixture
def places(dump: Path, tmp_path: Path) -> dict[str, Path]:
    found = {"dump": dump, "new": tmp_path / "new", "empty": tmp_path / "empty", "file": tmp_path / "file"}
    found["empty"].mkdir()
    found["file"].write_text("text")
    return found


@pytest.mark.parametrize(("arguments", "text"), WRONG_USE, ids=[" ".join(a) for a, _ in WRONG_USE])
def test_wrong_use_is_one_line_and_code_2_and_leaves_nothing(run, places, arguments: list[str], text: str) -> None:
    code, out, err = run(*(a.format(**places) for a in arguments))
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith("hiddentap: ")
    assert text in err
    assert not places["new"].exists()


@pytest.mark.parametrize(("arguments", "text"), OTHER_FILES, ids=[" ".join(a) for a, _ in OTHER_FILES])
def test_files_of_another_layout_are_one_line_and_code_1(run, places, arguments: list[str], text: str) -> None:
    code, out, err = run(*(a.format(**places) for a in arguments), "--out", places["new"])
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert text in err
    assert not places["new"].exists()


def test_layer_ids_that_are_no_integers_are_named(run, dump: Path, tmp_path: Path) -> None:
    run("export", dump, "--to", "modelopt", "--dest", tmp_path / "d")
    code, _, err = run("import", tmp_path / "d", "--from", "modelopt", "--out", tmp_path / "o", "--layer-ids", "1,x")
    assert code == 2
    assert "must be plain integers; got 'x'" in err


def test_verify_names_the_layers_of_a_dump_whose_ids_are_off_by_one(
    run, dump: Path, target: Path, tmp_path: Path
) -> None:
    run("export", dump, "--to", "modelopt", "--dest", tmp_path / "d")
    for record in ("hiddentap-export.json", "hiddentap-export.sha256", "hiddentap-samples.jsonl"):
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


def test_verify_of_an_export_compares_its_files_with_their_checksums(run, dump: Path, tmp_path: Path) -> None:
    run("export", dump, "--to", "modelopt", "--dest", tmp_path / "d")
    code, out, _ = run("verify", tmp_path / "d")
    assert (code, out.startswith("OK: no problems found; 6 files of an export, ")) == (0, True)
    for path in (tmp_path / "d").glob("*.pt"):
        data = bytearray(path.read_bytes())
        data[100] ^= 4
        path.write_bytes(data)
    code, out, _ = run("verify", tmp_path / "d", "--quiet")
    assert code == 1
    (line,) = out.splitlines()
    assert "its bytes changed on disk" in line
    assert "(4 more like this in 5 files: " in line
    code, _, err = run("verify", tmp_path / "d", "--model", "none")
    assert (code, "is an export, whose files alone are checked" in err) == (2, True)
