"""Ours, to a trainer's files, and back: the same bits, samples and words."""

from pathlib import Path

import pytest
import torch

from hiddentap import CapturedDataset
from hiddentap.capture.formats import ExportSettings, ImportSettings, export_dataset, import_dataset
from hiddentap.capture.store import check_folder
from support.trainer_dump import CONSECUTIVE, IDS, capture

# Layout, options of its export, options of its import, which norm state comes back.
CASES = [
    ("specforge", {"algorithm": "eagle3"}, {}, "post_norm"),
    ("specforge", {"algorithm": "dspark", "compress": True}, {}, "post_norm"),
    ("specforge", {"algorithm": "dflash"}, {}, None),
    ("specforge", {"algorithm": "domino"}, {}, None),
    ("speculators", {}, {}, "pre_norm"),
    ("deepspec", {"shard_size": 2}, {}, "post_norm"),
    ("modelopt", {}, {}, "post_norm"),
    ("modelopt", {"norm": "pre"}, {}, "pre_norm"),
    ("automodel-dspark", {"shard_size": 2, "seq_length": 40}, {}, "post_norm"),
    ("automodel-eagle3", {"draft_vocab_size": 9}, {"first_token": 7}, None),
    ("angelslim", {"algorithm": "eagle3"}, {}, "post_norm"),
    ("angelslim", {"algorithm": "dflash"}, {}, None),
]
NAMES = [f"{to}-{'-'.join(map(str, options.values()))}" for to, options, *_ in CASES]


@pytest.fixture(scope="module")
def both(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture with both norm states, in bfloat16."""
    return capture(target, data, tmp_path_factory.mktemp("both") / "out", (1, 3, 4), final="both")


@pytest.mark.parametrize(("to", "options", "back", "norm"), CASES, ids=NAMES)
def test_rows_come_back_bit_for_bit(
    both: Path, tmp_path: Path, to: str, options: dict, back: dict, norm: str | None
) -> None:
    if to == "speculators":
        pytest.importorskip("datasets")
    export_dataset(ExportSettings(both, to, tmp_path / "files", **options))
    import_dataset(ImportSettings(tmp_path / "files", to, tmp_path / "back", shard_rows=20, **back))
    ours, found = CapturedDataset(both), CapturedDataset(tmp_path / "back")
    due = CONSECUTIVE if options.get("algorithm") in ("dflash", "domino", "dspark") and to == "specforge" else IDS
    assert [item["sample_id"] for item in (found[i] for i in range(len(found)))] == due
    for i in range(len(found)):
        item, original = found[i], ours[ours.index_of(due[i])]
        assert set(item) == {"input_ids", "loss_mask", "aux_hidden_states", "sample_id", "source", "line"} | (
            {norm} - {None}
        )
        for name in ("input_ids", "loss_mask", "aux_hidden_states", *([norm] if norm else [])):
            assert item[name].dtype == original[name].dtype, name
            assert torch.equal(item[name], original[name]), (name, due[i])
        assert (item["source"], item["line"]) == (original["source"], original["line"])
    assert check_folder(tmp_path / "back") == []


@pytest.mark.parametrize(("to", "options", "back", "norm"), CASES, ids=NAMES)
def test_the_header_says_again_what_it_said(
    both: Path, tmp_path: Path, to: str, options: dict, back: dict, norm: str | None
) -> None:
    if to == "speculators":
        pytest.importorskip("datasets")
    export_dataset(ExportSettings(both, to, tmp_path / "files", **options))
    import_dataset(ImportSettings(tmp_path / "files", to, tmp_path / "back", **back))
    ours, found = CapturedDataset(both).metadata, CapturedDataset(tmp_path / "back").metadata
    assert found["model"] == ours["model"]
    assert found["compute_dtype"] == ours["compute_dtype"]
    assert found["mode"] == "imported"
    for name in ("boundaries", "num_hidden_layers", "hidden_size", "layers_path"):
        assert found["taps"][name] == ours["taps"][name]
    assert found["taps"]["final"] == {"pre_norm": "pre", "post_norm": "post", None: "none"}[norm]


def test_eagle1_brings_back_the_last_states_alone(captured, tmp_path: Path) -> None:
    dump = captured("out", (1,), final="post", store_dtype="float16")
    export_dataset(ExportSettings(dump, "eagle1", tmp_path / "files"))
    import_dataset(ImportSettings(tmp_path / "files", "eagle1", tmp_path / "back"))
    ours, found = CapturedDataset(dump), CapturedDataset(tmp_path / "back")
    assert found.metadata["taps"]["boundaries"] == []
    for i in range(5):
        assert "aux_hidden_states" not in found[i]
        assert torch.equal(found[i]["post_norm"], ours[i]["post_norm"])
        assert torch.equal(found[i]["loss_mask"], ours[i]["loss_mask"])
    assert check_folder(tmp_path / "back") == []


@pytest.mark.parametrize("to", ["modelopt", "automodel-dspark"])
def test_float32_comes_back_bit_for_bit_where_the_layout_keeps_it(dump32: Path, tmp_path: Path, to: str) -> None:
    export_dataset(ExportSettings(dump32, to, tmp_path / "files"))
    import_dataset(ImportSettings(tmp_path / "files", to, tmp_path / "back"))
    ours, found = CapturedDataset(dump32), CapturedDataset(tmp_path / "back")
    for i in range(5):
        assert found[i]["aux_hidden_states"].dtype == torch.float32
        assert torch.equal(found[i]["aux_hidden_states"], ours[i]["aux_hidden_states"])


def test_an_import_can_be_exported_again_to_the_same_files(both: Path, tmp_path: Path) -> None:
    export_dataset(ExportSettings(both, "deepspec", tmp_path / "files"))
    import_dataset(ImportSettings(tmp_path / "files", "deepspec", tmp_path / "back"))
    export_dataset(ExportSettings(tmp_path / "back", "deepspec", tmp_path / "again"))
    for name in ("manifest.json", "samples.idx", "shard-00000.bin"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "files" / name).read_bytes()


def test_the_embeddings_come_back_from_minus_one(captured, tmp_path: Path) -> None:
    dump = captured("out", (0, 3), convention="boundary")
    export_dataset(ExportSettings(dump, "deepspec", tmp_path / "files"))
    import_dataset(ImportSettings(tmp_path / "files", "deepspec", tmp_path / "back"))
    ours, found = CapturedDataset(dump), CapturedDataset(tmp_path / "back")
    assert found.metadata["taps"]["boundaries"] == [0, 3]
    assert torch.equal(found[1]["aux_hidden_states"], ours[1]["aux_hidden_states"])


def test_automodel_dspark_gives_back_the_layers_before_the_norm_alone(captured, tmp_path: Path) -> None:
    dump = captured("out", (2, 7), final="both")
    export_dataset(ExportSettings(dump, "automodel-dspark", tmp_path / "files"))
    import_dataset(ImportSettings(tmp_path / "files", "automodel-dspark", tmp_path / "back"))
    ours, found = CapturedDataset(dump), CapturedDataset(tmp_path / "back")
    assert found.metadata["taps"]["boundaries"] == [3]
    for i in range(5):
        assert torch.equal(found[i]["aux_hidden_states"], ours[i]["aux_hidden_states"][:, :1])
        assert torch.equal(found[i]["post_norm"], ours[i]["post_norm"])
