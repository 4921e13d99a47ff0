"""Our exports in the own classes of trainers whose packages cannot be imported whole.

AngelSlim's wheel lacks a module that its __init__ wants, so the classes that read are imported past it. DeepSpec has no package,
EAGLE-1 and AngelSlim's DFlash have their readers in scripts: their tests need checkouts (DeepSpec, EAGLE v1, AngelSlim)
below the folder $HIDDENTAP_PEER_SOURCES, and are skipped without it.
"""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from hiddentap.capture.formats import ExportSettings, export_dataset
from support.peer_code import angelslim_module, bare_packages, checkout, definitions, installed
from support.trainer_dump import Expected, H, capture

BOUNDARIES = (2, 4, 5)
DATA = "compressor.speculative.train.data"
PACKAGES = (
    "utils",
    "compressor",
    "compressor.speculative",
    "compressor.speculative.train",
    DATA,
    f"{DATA}.dataset_builder",
)
READER = f"angelslim.{DATA}.dataset_builder.offline_dataset_builder"


def exported(dump: Path, dest: Path, to: str, **options: object) -> Path:
    export_dataset(ExportSettings(dump, to, dest, **options))
    return dest


@pytest.fixture
def angelslim() -> Iterator[Any]:
    """AngelSlim's module of offline data sets, from the installed package."""
    pytest.importorskip("datasets")
    folder = installed("angelslim")
    with warnings.catch_warnings(), bare_packages(folder, *PACKAGES):
        warnings.simplefilter("ignore")
        yield angelslim_module(READER)


def assert_rows(batch: dict[str, torch.Tensor], expected: list[Expected], T: int) -> None:
    """Ids, mask and layers of all samples, with zeros behind them."""
    assert batch["input_ids"].shape == (len(expected), T)
    for row, sample in enumerate(expected):
        S = sample.S
        assert torch.equal(batch["input_ids"][row, :S], sample.input_ids)
        assert torch.equal(batch["loss_mask"][row, :S], sample.loss_mask)
        assert torch.equal(batch["hidden_states"][row, :S], sample.side_by_side(*BOUNDARIES))
        assert batch["attention_mask"][row].tolist() == [1] * S + [0] * (T - S)
        assert not any(batch[name][row, S:].any() for name in ("input_ids", "loss_mask", "hidden_states"))


# --- AngelSlim


def test_angelslim_collates_the_eagle3_files(
    angelslim: Any, dump: Path, expected: list[Expected], tmp_path: Path
) -> None:
    dest = exported(dump, tmp_path / "d", "angelslim", algorithm="eagle3")
    builder = angelslim.OfflineLLMDatasetBuilder()
    found = builder.build_dataset(str(dest))
    assert len(found) == 5
    batch = builder.get_data_collator()([found[i] for i in range(5)])
    assert_rows(batch, expected, 23)
    for row, sample in enumerate(expected):
        assert torch.equal(batch["target_hiddens"][row, : sample.S], sample.post)


def test_angelslim_takes_no_eagle3_file_without_last_states(angelslim: Any, dump: Path, tmp_path: Path) -> None:
    """Why the DFlash export is no EAGLE-3 export."""
    found = angelslim.OfflineEagle3Dataset(str(exported(dump, tmp_path / "d", "angelslim", algorithm="dflash")))
    with pytest.raises(RuntimeError, match="All checkpoint files failed to load"):
        found[0]


def test_angelslim_collates_the_dflash_files(
    angelslim: Any, dump: Path, expected: list[Expected], tmp_path: Path
) -> None:
    script = checkout("AngelSlim", "tools/train_dflash_offline.py") / "tools/train_dflash_offline.py"
    names = definitions(
        script, {"OfflineDFlashDataset"}, {"torch": torch, "OfflineEagle3Dataset": angelslim.OfflineEagle3Dataset}
    )
    found = names["OfflineDFlashDataset"](str(exported(dump, tmp_path / "d", "angelslim", algorithm="dflash")))
    batch = angelslim.DataCollatorWithPadding()([found[i] for i in range(5)])
    assert_rows(batch, expected, 23)
    assert batch["target_hiddens"] is None


# --- DeepSpec


@pytest.fixture
def deepspec(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """DeepSpec's module of target caches."""
    root = checkout("DeepSpec", "deepspec/data/target_cache_dataset.py")
    monkeypatch.syspath_prepend(str(root))
    with bare_packages(root / "deepspec", "data"):
        from deepspec.data import target_cache_dataset

        yield target_cache_dataset


def test_deepspec_collates_the_cache(deepspec: Any, dump: Path, expected: list[Expected], tmp_path: Path) -> None:
    found = deepspec.CacheDataset(str(exported(dump, tmp_path / "d", "deepspec", shard_size=2)))
    assert len(found) == 5
    batch = deepspec.CacheCollator()([found[i] for i in range(5)])
    assert_rows({**batch, "hidden_states": batch["target_hidden_states"]}, expected, 23)
    for row, sample in enumerate(expected):
        assert torch.equal(batch["target_last_hidden_states"][row, : sample.S], sample.post)
    found.close()


def test_deepspec_holds_the_manifest_against_the_draft(deepspec: Any, dump: Path, tmp_path: Path) -> None:
    dest = exported(dump, tmp_path / "d", "deepspec", target_model="org/target")
    found = deepspec.CacheDataset(str(dest))
    config = SimpleNamespace(hidden_size=H)
    right = SimpleNamespace(target_layer_ids=[1, 3, 4], config=config)
    deepspec.validate_train_cache(train_dataset=found, draft_model=right, target_model_name_or_path="org/target")
    shifted = SimpleNamespace(target_layer_ids=[2, 4, 5], config=config)
    with pytest.raises(AssertionError, match="do not match draft model configuration"):
        deepspec.validate_train_cache(train_dataset=found, draft_model=shifted, target_model_name_or_path="org/target")
    found.close()


def test_deepspec_itself_writes_the_same_bytes(
    deepspec: Any, dump: Path, expected: list[Expected], tmp_path: Path
) -> None:
    dest = exported(dump, tmp_path / "d", "deepspec")
    arrays = []
    for number, sample in enumerate(expected):
        written = deepspec.build_target_cache_sample_bytes(
            sample_id=number, input_ids=sample.input_ids, attention_mask=torch.ones(sample.S), loss_mask=sample.loss_mask,
            target_hidden_states=sample.side_by_side(*BOUNDARIES), target_last_hidden_states=sample.post,
        )  # fmt: skip
        arrays += [written.input_ids, written.attention_mask, written.loss_mask]
        arrays += [written.target_hidden_states, written.target_last_hidden_states]
    assert (dest / "shard-00000.bin").read_bytes() == b"".join(arrays)


# --- EAGLE-1


@pytest.fixture
def eagle1() -> Any:
    """The functions and classes that read, of a script that parses arguments and loads a model when it is imported."""
    script = checkout("EAGLE", "eagle/train/main.py") / "eagle/train/main.py"
    around = {
        "torch": torch,
        "os": os,
        "Dataset": Dataset,
        "train_config": {"max_len": 2048},
        "Any": Any,
        "Dict": dict,
        "List": list,
    }
    return SimpleNamespace(**definitions(script, {"list_files", "CustomDataset", "DataCollatorWithPadding"}, around))


def test_eagle1_collates_every_file_below_the_data_folder(
    eagle1: Any, target: Path, data: Path, expected32: list[Expected], tmp_path: Path
) -> None:
    dump = capture(target, data, tmp_path / "out", (1,), dtype="float32")
    files = sorted(eagle1.list_files(str(exported(dump, tmp_path / "d", "eagle1") / "data")))
    assert len(files) == 5
    found = eagle1.CustomDataset(files)
    batch = eagle1.DataCollatorWithPadding()([found[i] for i in range(5)])
    for row, sample in enumerate(expected32):
        S, states = sample.S, sample.post.half().float()
        assert torch.equal(batch["hidden_states"][row, :S], states)
        assert torch.equal(batch["target"][row, : S - 1], states[1:])
        assert batch["input_ids"][row, :S].tolist() == [*sample.input_ids.tolist()[1:], 0]
        assert batch["loss_mask"][row, :S].tolist() == [*sample.loss_mask.tolist()[:-1], 0]
