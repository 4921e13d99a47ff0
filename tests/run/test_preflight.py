"""The order of checks: options, config, OUT, data, tokenizer, and only then the weights, which may take an hour to read."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hiddentap import CaptureSettings, ModelSource, TextSettings, capture_dataset
from hiddentap.capture.run import estimate_run
from hiddentap.capture.store import FolderLockedError, OutputFolder
from hiddentap.models.errors import HiddentapError, UsageError
from support.model_folder import write_rows

BOTH = pytest.mark.parametrize("run", [capture_dataset, estimate_run], ids=["run", "dry run"])
Run = Callable[[CaptureSettings], Any]


@pytest.fixture
def weightless(llama: Path, tmp_path: Path) -> Path:
    """The model folder without its weights."""
    return shutil.copytree(llama, tmp_path / "weightless", ignore=shutil.ignore_patterns("*.safetensors"))


@pytest.fixture
def without_tokenizer(weightless: Path) -> Path:
    for file in weightless.glob("*token*"):
        file.unlink()
    return weightless


def settings(model: Path, data: Path, out: Path, **fields: Any) -> CaptureSettings:
    return CaptureSettings(ModelSource(str(model)), (str(data),), out, **{"layer_ids": (0, 2), **fields})


FAULTS = {
    "options": (lambda asked, _: {**asked, "engine": "vllm", "exact": True}, "--exact promises the bits"),
    "config": (lambda asked, _: {**asked, "layer_ids": (0, 4)}, "outside the decoder range"),
    "OUT": (lambda asked, folder: {**asked, "out": folder / "a file"}, "is a file; give a folder"),
    "data": (lambda asked, folder: {**asked, "data": folder / "none.jsonl"}, r"expected the file .*none\.jsonl"),
    "tokenizer": (lambda asked, _: asked, "tokenizer"),
    "weights": (lambda asked, _: asked, "weightless"),
}


@BOTH
@pytest.mark.parametrize("first", list(FAULTS)[:-1])
def test_of_several_faults_the_one_that_is_checked_first_is_told(
    run: Run, first: str, without_tokenizer: Path, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "a file").write_text("x")
    asked = {"out": tmp_path / "out", "data": data}
    for change, _ in list(FAULTS.values())[list(FAULTS).index(first) :]:
        asked = change(asked, tmp_path)
    with pytest.raises(HiddentapError, match=FAULTS[first][1]):
        run(settings(without_tokenizer, asked.pop("data"), asked.pop("out"), **asked))
    assert not (tmp_path / "out").exists()


def test_absent_weights_are_the_last_to_be_missed(weightless: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"weightless cannot be loaded: .*no file named model\.safetensors"):
        capture_dataset(settings(weightless, data, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@BOTH
def test_a_folder_that_cannot_be_written_is_told_before_the_weights(
    run: Run, weightless: Path, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "a file").write_text("x")
    for out in (Path("/proc/none/out"), tmp_path / "a file/out"):
        with pytest.raises(UsageError, match=r"cannot be written or locked|cannot be made, because .*a file is a file"):
            run(settings(weightless, data, out))


@BOTH
def test_a_folder_in_use_and_one_that_is_not_ours_are_told_before_the_weights(
    run: Run, weightless: Path, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange/file").write_text("x")
    with pytest.raises(UsageError, match="was not made by hiddentap"):
        run(settings(weightless, data, tmp_path / "strange"))
    with OutputFolder(tmp_path / "out").lock(), pytest.raises(FolderLockedError):
        run(settings(weightless, data, tmp_path / "out"))


OTHERS = {
    "layers": ({"layer_ids": (1, 2)}, r"taps\.layer_ids: \[0, 2\] -> \[1, 2\]"),
    "final": ({"final": "none"}, r"taps\.final"),
    "mode": ({"exact": True}, r'mode: "batched" -> "exact"'),
    "shard rows": ({"shard_rows": 99}, r"shard_rows: 262144 -> 99"),
    "stored dtype": ({"store_dtype": "bfloat16"}, r"store_dtype"),
    "text": ({"text": TextSettings(max_length=60)}, r"tokenisation\.max_length"),
    "data": ({}, r"data: "),
}


@BOTH
@pytest.mark.parametrize("other", OTHERS)
def test_a_folder_of_another_run_is_told_before_the_weights(
    run: Run, other: str, llama: Path, weightless: Path, data: Path, tmp_path: Path
) -> None:
    capture_dataset(settings(llama, data, tmp_path / "out"))
    fields, differs = OTHERS[other]
    if other == "data":
        data = write_rows(tmp_path / "other.jsonl", [{"id": "a", "input_ids": [1, 2, 3]}])
    with pytest.raises(UsageError, match=rf"holds another run.*(\n.*)*{differs}"):
        run(settings(weightless, data, tmp_path / "out", **fields))


def test_a_dry_run_needs_no_weights_and_writes_nothing(
    llama: Path, weightless: Path, data: Path, tmp_path: Path
) -> None:
    for fields in ({}, {"exact": True, "top_logits": 3, "store_dtype": "float16", "final": "both"}):
        without = estimate_run(settings(weightless, data, tmp_path / "out", **fields))
        known = estimate_run(settings(llama, data, tmp_path / "out", **fields))
        assert (without.bytes_needed, without.audit) == (known.bytes_needed, known.audit)
        assert [(tap.name, tap.boundary) for tap in without.taps] == [(tap.name, tap.boundary) for tap in known.taps]
        assert (without.tokens_per_second, without.seconds, without.untimed) == (0, 0, f"{weightless} has no weights")
        assert (known.tokens_per_second > 0, known.untimed) == (True, None)
    assert not (tmp_path / "out").exists()
    (tmp_path / "empty").mkdir()
    estimate_run(settings(weightless, data, tmp_path / "empty"))
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize(
    ("fields", "taps"),
    [
        (
            {"layer_ids": (0, 2), "final": "both"},
            [
                ("layer 0", 1, "output of model.layers.0"),
                ("layer 2", 3, "output of model.layers.2"),
                ("pre-norm", 4, "input of the final norm"),
                ("post-norm", 4, "output of the final norm"),
            ],
        ),
        (
            {"layer_ids": (0, 3), "ids_of": "vllm", "final": "none"},
            [("boundary 0", 0, "input of model.layers.0"), ("boundary 3", 3, "output of model.layers.2")],
        ),
        (
            {"layer_ids": (1, 3), "ids_of": "vllm", "final": "none"},
            [("layer 0", 1, "output of model.layers.0"), ("layer 2", 3, "output of model.layers.2")],
        ),
    ],
    ids=["layers", "embeddings", "of another system"],
)
def test_a_dry_run_names_each_tap_and_the_tensor_that_it_reads(
    fields: dict[str, Any], taps: list[tuple[str, int, str]], weightless: Path, data: Path, tmp_path: Path
) -> None:
    found = estimate_run(settings(weightless, data, tmp_path / "out", **fields)).taps
    assert [(tap.name, tap.boundary, tap.reads) for tap in found] == taps


def test_a_model_that_cannot_be_built_without_weights_is_checked_when_it_is_loaded(
    llama: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unbuildable(_source: ModelSource) -> None:
        raise TypeError("needs real numbers")

    monkeypatch.setattr("hiddentap.hooks.tapped_model.model_skeleton", unbuildable)
    with pytest.raises(UsageError, match="outside the decoder range"):
        capture_dataset(settings(llama, data, tmp_path / "out", layer_ids=(0, 4)))
    assert capture_dataset(settings(llama, data, tmp_path / "out")).captured == 5
    assert estimate_run(settings(llama, data, tmp_path / "out")).tokens_per_second > 0
