"""`hiddentap report` and `hiddentap inspect --sample` as a user types them."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from hiddentap import CapturedDataset
from hiddentap.capture.cli.sample_rows import SampleRows, plain_table
from support.captured import captured
from support.damage import Columns, rewrite
from support.model_folder import llama_folder
from support.terminal import on_a_terminal


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six conversations in two shards."""
    return captured(llama_folder(tmp_path_factory.mktemp("llama")), tmp_path_factory.mktemp("good") / "out")


def test_report_writes_page_and_pictures_and_says_the_verdict(run, folder: Path, tmp_path: Path) -> None:
    code, out, err = run("report", folder, "--html", tmp_path / "r.html", "--png", tmp_path / "png")
    assert code == 0
    assert re.fullmatch(r"[\d-]{10} [\d:]{8} reading: (\d+) of \1 rows\n", err)
    assert out.splitlines() == ["Nothing unusual.", f"page: {tmp_path / 'r.html'}, 6 figures in {tmp_path / 'png'}"]
    assert (tmp_path / "r.html").stat().st_size > 50_000
    assert sorted(path.name for path in (tmp_path / "png").iterdir()) == [
        "cosine.png", "lengths.png", "loss-mask.png", "norms.png", "outliers.png", "variance.png",
    ]  # fmt: skip


def test_report_says_what_to_look_at_and_what_it_means(run, folder: Path, tmp_path: Path) -> None:
    spoilt = Path(shutil.copytree(folder, tmp_path / "out"))

    def copy_layer(columns: Columns) -> None:
        columns["aux_hidden_states"][:, 1] = columns["aux_hidden_states"][:, 0]

    rewrite(spoilt, copy_layer, index=0)
    code, out, _ = run("report", spoilt, "--html", tmp_path / "r.html")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "1 thing that cannot be right."
    assert lines[1].startswith("- layer 0 and layer 1 are equal in ")
    assert "as when ids are off by one" in lines[2]


def test_the_page_goes_into_the_folder_unless_told_otherwise(run, folder: Path) -> None:
    code, out, _ = run("report", folder)
    page = folder / "report.html"
    assert code == 0
    assert f"page: {page}" in out
    assert page.exists()
    page.unlink()


def test_a_report_of_nothing_is_code_2(run, tmp_path: Path) -> None:
    code, out, err = run("report", tmp_path / "nowhere")
    assert (code, out) == (2, "")
    assert err == f"hiddentap: {tmp_path / 'nowhere'} is not there; expected the folder of a capture.\n"


@pytest.mark.parametrize("option", ["--html", "--png"])
def test_a_place_below_a_file_is_refused_in_one_line(run, folder: Path, tmp_path: Path, option: str) -> None:
    (tmp_path / "file").write_text("text")
    code, out, err = run("report", folder, "--quiet", "--html", tmp_path / "page.html", option, tmp_path / "file/x")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert f"cannot be made, because {tmp_path / 'file'} is a file; choose another folder." in err


def test_a_piped_sample_is_plain_text_with_a_line_per_token(run, folder: Path) -> None:
    code, out, _ = run("inspect", folder, "--sample", "s2")
    assert code == 0
    assert "\x1b" not in out
    assert "[[About 24 miles by road.<|im_end|>]]" in out
    item = CapturedDataset(folder)[2]
    head, *rows = out.split("Row by row, with the norm of each stored state:\n")[1].splitlines()
    assert head.split("  ")[-1] == "token"
    assert re.split(r" {2,}", head.strip()) == [
        "row", "id", "mask", "layer 0", "layer 1", "layer 3", "pre-norm", "post-norm", "token",
    ]  # fmt: skip
    assert len(rows) == len(item["input_ids"])
    states = torch.cat([item["aux_hidden_states"], item["pre_norm"][:, None], item["post_norm"][:, None]], 1).double()
    for t, line in enumerate(rows):
        cells = line.split(maxsplit=8)
        assert [int(cell) for cell in cells[:3]] == [t, int(item["input_ids"][t]), int(item["loss_mask"][t])]
        shown = [float(cell.replace(",", "")) for cell in cells[3:8]]
        assert shown == pytest.approx([float((states[t, k] ** 2).sum() ** 0.5) for k in range(5)], rel=6e-3)


def test_a_sample_on_a_terminal_is_in_colour_and_keeps_its_numbers_on_a_narrow_one(folder: Path) -> None:
    out = on_a_terminal("inspect", folder, "--sample", "s2", columns=40)
    assert "\x1b[32m[[About 24 miles by road.<|im_end|>]]\x1b[0m" in out
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    table = plain.split("Row by row")[1].splitlines()[1:]
    item = CapturedDataset(folder)[2]
    marked = [line for line in table if "●" in line]
    assert len(marked) == int(item["loss_mask"].sum())
    assert len([line for line in table if re.match(r" +\d+ +\d+ ", line)]) == len(item["input_ids"])
    assert re.search(r"\x1b\[36m[▁▂▃▄▅▆▇█]\x1b\[0m", out)
    assert "…" not in plain
    assert "post-norm" in plain


def test_tokens_cannot_reach_the_terminal_as_control_characters() -> None:
    sample = SampleRows("t", [("x", True)], ["\x1b[31m", "\n"], [1, 2], [True, False], ["layer 0"], [[1.0], [2500.0]])
    assert list(plain_table(sample)) == [
        "row  id  mask  layer 0  token",
        "  0   1     1        1  '\\x1b[31m'",
        "  1   2     0    2,500  '\\n'",
    ]
