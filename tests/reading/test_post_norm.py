"""Post-norm made while reading, beside what a capture stores of it."""

from pathlib import Path

import pytest
import torch

from hiddentap import CapturedDataset, CaptureSettings, ModelSource, capture_dataset, load_head
from hiddentap.capture.reading import PackedDataset, PostNorm
from hiddentap.models.errors import UsageError
from hiddentap.models.head import HeadError


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_post_norm_made_from_pre_norm_has_the_bits_of_stored_post_norm(
    tmp_path: Path, target: Path, rows: Path, dtype: str
) -> None:
    settings = {"data": rows, "exact": True, "dtype_of_model": dtype}
    pre = CapturedDataset(_captured(target, tmp_path / "pre", final="pre", head=True, **settings))
    stored = CapturedDataset(_captured(target, tmp_path / "post", final="post", **settings))
    for pack in PackedDataset(pre, 60, post_norm=PostNorm(pre)):
        expected = torch.cat([stored[int(i)]["post_norm"] for i in pack["sample_indices"]])
        assert pack["post_norm"].dtype == getattr(torch, dtype)
        assert torch.equal(pack["post_norm"], expected)
        assert not torch.equal(pack["post_norm"], pack["pre_norm"])


def test_stored_post_norm_is_given_as_it_is(tmp_path: Path, target: Path, rows: Path) -> None:
    dataset = CapturedDataset(_captured(target, tmp_path / "out", data=rows, final="post", head=True))
    pack = next(iter(PackedDataset(dataset, 60, post_norm=PostNorm(dataset))))
    assert torch.equal(pack["post_norm"], torch.cat([dataset[int(i)]["post_norm"] for i in pack["sample_indices"]]))


def test_a_capture_without_head_is_refused(tmp_path: Path, target: Path, rows: Path) -> None:
    dataset = CapturedDataset(_captured(target, tmp_path / "out", data=rows, final="pre"))
    with pytest.raises(HeadError, match="capture with --head"):
        PostNorm(dataset)


def test_it_is_a_module_that_is_called_with_rows(dataset: CapturedDataset) -> None:
    post_norm = PostNorm(dataset)
    item = dataset[0]
    module = load_head(str(dataset.path / "head")).norm
    assert torch.equal(post_norm(item["pre_norm"]), module(item["pre_norm"]))
    assert post_norm(item["pre_norm"][:2].view(1, 2, -1)).shape == (1, 2, 32)
    assert isinstance(post_norm, torch.nn.Module)
    assert not post_norm(item["pre_norm"]).requires_grad


def test_a_capture_without_final_states_is_refused(tmp_path: Path, target: Path, rows: Path) -> None:
    dataset = CapturedDataset(_captured(target, tmp_path / "out", data=rows, final="none", head=True))
    with pytest.raises(UsageError, match="holds neither pre_norm nor post_norm"):
        PackedDataset(dataset, 60, post_norm=PostNorm(dataset))


def _captured(target: Path, folder: Path, dtype_of_model: str = "float32", **fields: object) -> Path:
    settings = {"layer_ids": (0, 2)} | fields
    data = (str(settings.pop("data")),)
    capture_dataset(CaptureSettings(ModelSource(str(target), dtype=dtype_of_model), data, folder, **settings))
    return folder
