"""A real model, from the command to the stored rows: SmolLM2-135M-Instruct on this project's conversations."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from hiddentap import CapturedDataset

pytestmark = [pytest.mark.smollm2, pytest.mark.slow]

DATA = Path(__file__).parent.parent / "data" / "conversations.jsonl"
LAYERS = (1, 14, 26)
SAMPLES, MOST_TOKENS = 10, 160


def captured(model: Path, out: Path, *options: str) -> CapturedDataset:
    command = [sys.executable, "-m", "hiddentap", "capture", "--model", model, "--data", DATA, "--layer-ids", "1,14,26"]
    limits = ["--limit", str(SAMPLES), "--max-length", str(MOST_TOKENS), "--out", out]
    subprocess.run([*map(str, command), *map(str, limits), *options], check=True)
    return CapturedDataset(out)


class Plain:
    """Plain forwards of the model, each made once for all tests: they cost more than the runs that are compared with them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models: dict[torch.dtype, nn.Module] = {}
        self._rows: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}

    def model(self, dtype: torch.dtype) -> nn.Module:
        if dtype not in self._models:
            self._models[dtype] = AutoModelForCausalLM.from_pretrained(self._folder, dtype=dtype).eval()
        return self._models[dtype]

    @torch.no_grad()
    def rows(self, dtype: torch.dtype, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(S, K, H) of the three layers, by boundary index, and (S, H) post-norm, of one plain forward."""
        key = (dtype, *ids.tolist())
        if key not in self._rows:
            hs = self.model(dtype)(ids[None], output_hidden_states=True, use_cache=False).hidden_states
            self._rows[key] = torch.stack([hs[layer + 1][0] for layer in LAYERS], 1), hs[30][0]
        return self._rows[key]


@pytest.fixture(scope="module")
def plain(smollm2_folder: Path) -> Plain:
    return Plain(smollm2_folder)


def test_exact_rows_equal_plain_forwards_bit_for_bit(smollm2_folder: Path, plain: Plain, tmp_path: Path) -> None:
    dataset = captured(smollm2_folder, tmp_path / "out", "--exact", "--final", "both")
    model = plain.model(torch.bfloat16)
    assert len(dataset) == SAMPLES
    for item in (dataset[i] for i in range(SAMPLES)):
        aux, post = plain.rows(torch.bfloat16, item["input_ids"])
        assert torch.equal(item["aux_hidden_states"], aux)
        assert torch.equal(model.model.norm(item["pre_norm"]), post)
        assert torch.equal(item["post_norm"], post)


def row_errors(rows: Tensor, truth: Tensor) -> Tensor:
    """|a - b| / |b| of each row (last dimension), flattened."""
    a, b = rows.double(), truth.double()
    return (torch.linalg.vector_norm(a - b, dim=-1) / torch.linalg.vector_norm(b, dim=-1)).flatten()


def test_batched_rows_are_as_close_to_float32_as_single_ones(
    smollm2_folder: Path, plain: Plain, tmp_path: Path
) -> None:
    """Batching bf16 changes roundings, and no constant bounds what comes of it; so its error against a float32 run is held
    against the error that a single bf16 forward has: median and 99th percentile within 1.25 times."""
    dataset = captured(smollm2_folder, tmp_path / "out", "--batch-tokens", "2048")
    batched, single = [], []
    for item in (dataset[i] for i in range(SAMPLES)):
        truth, _ = plain.rows(torch.float32, item["input_ids"])
        batched.append(row_errors(item["aux_hidden_states"], truth))
        single.append(row_errors(plain.rows(torch.bfloat16, item["input_ids"])[0], truth))
    for share in (0.5, 0.99):
        ours, theirs = torch.cat(batched).quantile(share), torch.cat(single).quantile(share)
        assert ours <= 1.25 * theirs, f"quantile {share}: {ours:.2e} against {theirs:.2e}"


def test_batched_float32_rows_are_within_1e_5(smollm2_folder: Path, plain: Plain, tmp_path: Path) -> None:
    dataset = captured(smollm2_folder, tmp_path / "out", "--dtype", "float32", "--batch-tokens", "2048")
    worst = max(
        float(row_errors(item["aux_hidden_states"], plain.rows(torch.float32, item["input_ids"])[0]).max())
        for item in (dataset[i] for i in range(SAMPLES))
    )
    assert worst <= 1e-5
