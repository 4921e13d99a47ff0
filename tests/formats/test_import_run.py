"""Foreign data sets taken over: by whose word, in which shards, and what is refused."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hiddentap import CapturedDataset
from hiddentap.capture.formats import (
    ExportSettings,
    FormatError,
    ImportSettings,
    LayoutError,
    export_dataset,
    import_dataset,
)
from hiddentap.capture.store import FolderLock, FolderLockedError, check_folder
from hiddentap.models.errors import RunError, UsageError
from hiddentap.models.layer_ids import LayerIdError
from support.trainer_dump import Expected, H, read_jsonl


@pytest.fixture
def foreign(expected: list[Expected], tmp_path: Path) -> Path:
    """A Model-Optimizer dump of layers 2 and 5 as another tool writes it: no record, ids of its own."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    for sample in expected:
        record = {
            "input_ids": sample.input_ids,
            "hidden_states": sample.post.clone(),
            "aux_hidden_states": sample.side_by_side(3, 6),
            "conversation_id": 17 if sample.sample_id == "one" else sample.sample_id[:5].replace("/", "_"),
        }
        torch.save(record, folder / f"{sample.S:03d}.pt")
    return folder


def imported(folder: Path, layout: str, out: Path, **options: object) -> CapturedDataset:
    import_dataset(ImportSettings(folder, layout, out, **options))
    return CapturedDataset(out)


def test_a_foreign_dump_is_taken_over_under_the_ids_that_are_claimed(foreign, expected, target, tmp_path) -> None:
    found = imported(foreign, "modelopt", tmp_path / "out", model=str(target), layer_ids=(2, 5))
    assert found.metadata["taps"] == {
        "convention": "layer_output", "layer_ids": [2, 5], "boundaries": [3, 6], "final": "post", "num_hidden_layers": 8,
        "hidden_size": H, "layers_path": "model.layers", "norm_path": None,
    }  # fmt: skip
    assert found.metadata["model"]["id"] == str(target)
    assert found.metadata["model"]["class"] == "LlamaForCausalLM"
    by_length = sorted(expected, key=lambda sample: sample.S)
    assert len(found) == 5
    for i, sample in enumerate(by_length):
        assert torch.equal(found[i]["input_ids"], sample.input_ids)
        assert torch.equal(found[i]["aux_hidden_states"], sample.states[[3, 6]].transpose(0, 1))
        assert torch.equal(found[i]["post_norm"], sample.post)
        assert found[i]["loss_mask"].tolist() == [1] * sample.S
    assert found[0]["sample_id"] == "17"
    assert (found[0]["source"], found[0]["line"]) == ("foreign", 1)
    assert check_folder(tmp_path / "out") == []


def test_the_models_hashes_are_those_that_a_capture_stores(foreign, target, dump, tmp_path) -> None:
    found = imported(foreign, "modelopt", tmp_path / "out", model=str(target), layer_ids=(2, 5)).metadata["model"]
    captured = CapturedDataset(dump).metadata["model"]
    for name in ("config_sha256", "weights_sha256", "class"):
        assert found[name] == captured[name]


def test_ids_may_count_states_instead_of_layers(foreign, tmp_path: Path) -> None:
    found = imported(foreign, "modelopt", tmp_path / "out", n=8, layer_ids=(2, 5), convention="boundary")
    assert found.metadata["taps"]["boundaries"] == [2, 5]
    assert found.metadata["taps"]["convention"] == "boundary"


def test_last_states_without_a_mark_may_be_said_to_be_before_the_norm(foreign, tmp_path: Path) -> None:
    found = imported(foreign, "modelopt", tmp_path / "out", n=8, layer_ids=(2, 5), final="pre")
    assert "pre_norm" in found[0]
    assert found.metadata["taps"]["final"] == "pre"


UNSAID = [
    (
        {"layer_ids": (2, 5)},
        FormatError,
        "nothing says how many decoder layers the model has; give --model M, or --n N.",
    ),
    ({"n": 8}, FormatError, "the files do not say which layers they hold; give --layer-ids"),
    ({"n": 4, "layer_ids": (2, 5)}, LayerIdError, r"outside the decoder range: \[5\]; num_hidden_layers=4"),
    ({"n": 8, "layer_ids": (5, 2)}, LayerIdError, "must be unique and strictly increasing"),
    ({"n": 8, "layer_ids": (2,)}, LayoutError, "expected 1 layers of width 32"),
    ({"n": 8, "layer_ids": (1, 2, 3)}, LayoutError, "expected 3 layers of width 32"),
]


@pytest.mark.parametrize(("options", "kind", "text"), UNSAID)
def test_what_nobody_says_or_what_does_not_fit_is_refused(foreign, tmp_path, options: dict, kind, text: str) -> None:
    with pytest.raises(kind, match=text):
        import_dataset(ImportSettings(foreign, "modelopt", tmp_path / "out", **options))
    assert not (tmp_path / "out").exists()


def test_a_model_of_another_width_is_refused(foreign, tmp_path: Path) -> None:
    from support import tiny
    from support.model_folder import VOCAB, model_folder

    other = model_folder(tmp_path / "m", tiny.build_llama(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=8))
    with pytest.raises(LayoutError, match="expected 2 layers of width 16"):
        import_dataset(ImportSettings(foreign, "modelopt", tmp_path / "out", model=str(other), layer_ids=(2, 5)))


def test_shards_end_where_they_are_full_and_an_import_goes_on(dump, tmp_path, monkeypatch) -> None:
    export_dataset(ExportSettings(dump, "deepspec", tmp_path / "f"))
    settings = ImportSettings(tmp_path / "f", "deepspec", tmp_path / "out", shard_rows=20)
    from hiddentap.capture.formats.deepspec import DeepSpecReader

    read = DeepSpecReader.read

    def broken(self: DeepSpecReader, number: int):
        if number == 3:
            raise OSError("gone")
        return read(self, number)

    monkeypatch.setattr(DeepSpecReader, "read", broken)
    with pytest.raises(OSError, match="gone"):
        import_dataset(settings)
    monkeypatch.undo()
    assert sorted(p.name for p in (tmp_path / "out/shards").iterdir()) == ["shard-000000.safetensors"]
    assert import_dataset(settings).shards_done_before == 1
    summary = import_dataset(settings)
    assert (summary.shards, summary.shards_done_before, summary.captured) == (3, 3, 5)
    found, ours = CapturedDataset(tmp_path / "out"), CapturedDataset(dump)
    assert [found[i]["sample_id"] for i in range(5)] == [ours[i]["sample_id"] for i in range(5)]
    assert all(torch.equal(found[i]["aux_hidden_states"], ours[i]["aux_hidden_states"]) for i in range(5))


def test_a_damaged_shard_of_an_import_is_made_again(dump, tmp_path: Path) -> None:
    export_dataset(ExportSettings(dump, "deepspec", tmp_path / "f"))
    settings = ImportSettings(tmp_path / "f", "deepspec", tmp_path / "out", shard_rows=20)
    import_dataset(settings)
    path = tmp_path / "out/shards/shard-000001.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    assert import_dataset(settings).shards_done_before == 1
    assert check_folder(tmp_path / "out") == []


def test_an_import_of_something_else_into_the_same_folder_is_refused(foreign, tmp_path: Path) -> None:
    imported(foreign, "modelopt", tmp_path / "out", n=8, layer_ids=(2, 5))
    with pytest.raises(UsageError, match=r"taps.boundaries: \[3, 6\] -> \[3, 5\]"):
        import_dataset(ImportSettings(foreign, "modelopt", tmp_path / "out", n=8, layer_ids=(2, 4)))
    with FolderLock(tmp_path / "out/.hiddentap-lock"), pytest.raises(FolderLockedError):
        import_dataset(ImportSettings(foreign, "modelopt", tmp_path / "out", n=8, layer_ids=(2, 5)))


NOT_OF_THE_LAYOUT = [
    ("specforge", "holds no .ckpt or .ckpt.gz file"),
    ("angelslim", "holds no .ckpt file"),
    ("eagle1", "holds no .ckpt file"),
    ("modelopt", "holds no .pt file"),
    ("deepspec", "is no DeepSpec cache: it holds no manifest"),
    ("automodel-dspark", "is no Automodel cache: it holds no manifest"),
    ("automodel-eagle3", "is no Automodel cache: it holds no manifest"),
    ("speculators", "is no saved data set"),
]


@pytest.mark.parametrize(("layout", "text"), NOT_OF_THE_LAYOUT)
def test_a_folder_without_the_layouts_files_is_refused(tmp_path: Path, layout: str, text: str) -> None:
    if layout == "speculators":
        pytest.importorskip("datasets")
    (tmp_path / "d").mkdir()
    with pytest.raises(LayoutError, match=text):
        import_dataset(ImportSettings(tmp_path / "d", layout, tmp_path / "out", n=8, layer_ids=(1,), first_token=1))


def test_a_speculators_row_whose_tokens_differ_is_rejected_and_told(dump, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    export_dataset(ExportSettings(dump, "speculators", tmp_path / "f"))
    path = tmp_path / "f/hidden_states/hs_1.safetensors"
    tensors = load_file(path)
    tensors["token_ids"][0] += 1
    save_file(tensors, path)
    (tmp_path / "f/hidden_states/hs_3.safetensors").unlink()
    summary = import_dataset(ImportSettings(tmp_path / "f", "speculators", tmp_path / "out"))
    assert (summary.captured, summary.rejected) == (3, 2)
    assert [(line["id"], line["reason"]) for line in read_jsonl(tmp_path / "out/rejects.jsonl")] == [
        ("a/b c", "the token ids in hs_1.safetensors are not those of the row"),
        ("x" * 300, "hs_3.safetensors is missing"),
    ]
    assert check_folder(tmp_path / "out") == []


def test_nothing_but_rejects_is_an_error(dump, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    export_dataset(ExportSettings(dump, "speculators", tmp_path / "f"))
    for path in (tmp_path / "f/hidden_states").iterdir():
        path.unlink()
    with pytest.raises(RunError, match="none of its 5 samples can be read"):
        import_dataset(ImportSettings(tmp_path / "f", "speculators", tmp_path / "out"))


def test_rejects_at_the_end_close_the_last_shard(dump, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    export_dataset(ExportSettings(dump, "speculators", tmp_path / "f"))
    (tmp_path / "f/hidden_states/hs_4.safetensors").unlink()
    settings = ImportSettings(tmp_path / "f", "speculators", tmp_path / "out", shard_rows=1)
    assert import_dataset(settings).rejected == 1
    again = import_dataset(settings)
    assert (again.captured, again.rejected, again.shards) == (4, 1, again.shards_done_before)
    assert check_folder(tmp_path / "out") == []


def test_an_automodel_eagle3_cache_needs_its_first_token(dump, tmp_path: Path) -> None:
    export_dataset(ExportSettings(dump, "automodel-eagle3", tmp_path / "f"))
    with pytest.raises(FormatError, match="without the first token of each sample; give it by --first-token ID"):
        import_dataset(ImportSettings(tmp_path / "f", "automodel-eagle3", tmp_path / "out"))


def test_padding_of_an_automodel_dspark_cache_by_another_tool_goes_by_its_id(dump, expected, tmp_path: Path) -> None:
    export_dataset(ExportSettings(dump, "automodel-dspark", tmp_path / "f", seq_length=30))
    path = tmp_path / "f/shard-000000.safetensors"
    tensors = load_file(path)
    for i, sample in enumerate(expected):
        # The model runs over the padding too, so its states are not zero there.
        tensors["target_last_hidden_states"][i, sample.S :] = 1
        tensors["input_ids"][i, sample.S :] = 2
    save_file(tensors, path)
    found = imported(tmp_path / "f", "automodel-dspark", tmp_path / "out", pad_id=2)
    assert [len(found[i]["input_ids"]) for i in range(5)] == [7, 12, 5, 23, 6]
    whole = imported(tmp_path / "f", "automodel-dspark", tmp_path / "whole")
    assert [len(whole[i]["input_ids"]) for i in range(5)] == [30] * 5


def test_a_deepspec_table_of_the_wrong_size_is_refused(dump, tmp_path: Path) -> None:
    export_dataset(ExportSettings(dump, "deepspec", tmp_path / "f"))
    index = tmp_path / "f/samples.idx"
    index.write_bytes(index.read_bytes()[:-1])
    with pytest.raises(LayoutError, match="should have 280 bytes, 56 for each of 5 samples"):
        import_dataset(ImportSettings(tmp_path / "f", "deepspec", tmp_path / "out"))


def test_a_deepspec_shard_that_ends_early_is_refused(dump, tmp_path: Path) -> None:
    export_dataset(ExportSettings(dump, "deepspec", tmp_path / "f"))
    shard = tmp_path / "f/shard-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(LayoutError, match="10 more were due"):
        import_dataset(ImportSettings(tmp_path / "f", "deepspec", tmp_path / "out"))


def test_a_deepspec_manifest_cannot_point_outside_its_folder(dump, tmp_path: Path) -> None:
    export_dataset(ExportSettings(dump, "deepspec", tmp_path / "f"))
    path = tmp_path / "f/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["shards"][0]["file_name"] = "../outside.bin"
    path.write_text(json.dumps(manifest))
    (tmp_path / "f/shard-00000.bin").rename(tmp_path / "outside.bin")
    with pytest.raises((LayoutError, OSError)):
        import_dataset(ImportSettings(tmp_path / "f", "deepspec", tmp_path / "out"))


def test_automodel_caches_that_are_not_whole_are_refused(dump, tmp_path: Path) -> None:
    export_dataset(ExportSettings(dump, "automodel-dspark", tmp_path / "f", shard_size=2))
    path = tmp_path / "f/manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"complete": False}))
    with pytest.raises(LayoutError, match="not complete"):
        import_dataset(ImportSettings(tmp_path / "f", "automodel-dspark", tmp_path / "out"))
    path.write_text(json.dumps(manifest | {"format_version": 2}))
    with pytest.raises(LayoutError, match="expected format_version 1, found 2"):
        import_dataset(ImportSettings(tmp_path / "f", "automodel-dspark", tmp_path / "out"))
    path.write_text(json.dumps(manifest))
    (tmp_path / "f/shard-000001.safetensors").unlink()
    with pytest.raises(LayoutError, match=r"shard-000001\.safetensors is missing"):
        import_dataset(ImportSettings(tmp_path / "f", "automodel-dspark", tmp_path / "out"))


def test_modelopt_files_of_both_norm_states_are_refused(foreign, tmp_path: Path) -> None:
    path = foreign / "023.pt"
    torch.save(torch.load(path, weights_only=True) | {"hidden_states_prenorm": True}, path)
    with pytest.raises(LayoutError, match=r"023.pt: hidden_states_prenorm differs from that of .*005.pt"):
        import_dataset(ImportSettings(foreign, "modelopt", tmp_path / "out", n=8, layer_ids=(2, 5)))


def test_arrays_of_different_lengths_in_one_sample_are_refused(foreign, tmp_path: Path) -> None:
    path = foreign / "012.pt"
    record = torch.load(path, weights_only=True)
    torch.save(record | {"input_ids": record["input_ids"][:-1]}, path)
    with pytest.raises(LayoutError, match=r"sample 3 .*expected one length for all of a sample's arrays"):
        import_dataset(ImportSettings(foreign, "modelopt", tmp_path / "out", n=8, layer_ids=(2, 5)))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_container_that_would_run_code_is_refused_and_does_not(tmp_path: Path) -> None:
    import gzip
    import pickle

    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    folder = tmp_path / "d"
    folder.mkdir()
    torch.save({"input_ids": Trap()}, folder / "a.ckpt")
    (folder / "b.ckpt").write_bytes(pickle.dumps({"input_ids": Trap()}))
    (folder / "c.ckpt.gz").write_bytes(gzip.compress(pickle.dumps(Trap())))
    for name in ("a.ckpt", "b.ckpt", "c.ckpt.gz"):
        only = tmp_path / name
        only.mkdir()
        (folder / name).rename(only / name)
        with pytest.raises(LayoutError, match="cannot be read as a container of tensors"):
            import_dataset(ImportSettings(only, "specforge", tmp_path / "out", n=8, layer_ids=(1,)))
    assert not (tmp_path / "ran").exists()


def test_a_damaged_container_is_refused_by_name(foreign, tmp_path: Path) -> None:
    path = foreign / "005.pt"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(LayoutError, match=r"005\.pt cannot be read as a container"):
        import_dataset(ImportSettings(foreign, "modelopt", tmp_path / "out", n=8, layer_ids=(2, 5)))


def test_the_table_of_a_deepspec_cache_is_read_in_its_own_order(dump, expected, tmp_path: Path) -> None:
    """Another tool may put the arrays anywhere in the shard."""
    export_dataset(ExportSettings(dump, "deepspec", tmp_path / "f"))
    shard, index = tmp_path / "f/shard-00000.bin", tmp_path / "f/samples.idx"
    shard.write_bytes(b"\0" * 13 + shard.read_bytes())
    records = [
        (*r[:3], *(offset + 13 for offset in r[3:])) for r in struct.iter_unpack("<QIIQQQQQ", index.read_bytes())
    ]
    index.write_bytes(b"".join(struct.pack("<QIIQQQQQ", *record) for record in records))
    found = imported(tmp_path / "f", "deepspec", tmp_path / "out")
    assert torch.equal(found[3]["post_norm"], expected[3].post)
