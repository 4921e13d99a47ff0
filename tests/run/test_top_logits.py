"""Top logits of an offline run: cut by top-p, and the probability that they hold together, told wherever they are."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from transformers import AutoModelForCausalLM

from hiddentap import CapturedDataset, CaptureSettings, ModelSource, capture_dataset
from hiddentap.capture.cli.capture import capture
from hiddentap.capture.report import write_report
from hiddentap.models.errors import UsageError
from support.model_folder import CHATS

K, P = 200, 0.4


def settings(model: Path, data: Path, out: Path, **fields: Any) -> CaptureSettings:
    given = {"layer_ids": (1,), "final": "none", "exact": True, "top_logits": K} | fields
    return CaptureSettings(ModelSource(str(model)), (str(data),), out, **given)


@torch.no_grad()
def plain_probabilities(model: Path, dataset: CapturedDataset) -> list[Tensor]:
    """(S, V) of each sample, float64, by a plain forward."""
    plain = AutoModelForCausalLM.from_pretrained(model).eval()
    return [plain(item["input_ids"][None].long()).logits[0].double().softmax(-1) for item in dataset]


def test_a_cut_keeps_the_fewest_tokens_that_reach_the_probability(llama: Path, data: Path, tmp_path: Path) -> None:
    capture_dataset(settings(llama, data, tmp_path / "out", top_logits_p=P))
    dataset = CapturedDataset(tmp_path / "out")
    kept_counts = set()
    for item, probabilities in zip(dataset, plain_probabilities(llama, dataset), strict=True):
        for t, row in enumerate(probabilities):
            values, ids = row.sort(descending=True)
            due, reached = 0, 0.0
            while due < K and reached < P:
                reached += float(values[due])
                due += 1
            found = item["topk_ids"][t]
            assert found[:due].tolist() == ids[:due].tolist()
            assert found[due:].tolist() == [-1] * (K - due)
            logits = item["topk_logits"][t]
            assert torch.isnan(logits[due:]).all()
            np.testing.assert_allclose((logits[:due] - item["topk_logsumexp"][t]).exp(), values[:due], rtol=1e-4)
            kept_counts.add(due)
    assert len(kept_counts) > 2  # rows are ragged


def test_a_p_of_one_keeps_all_k(llama: Path, data: Path, tmp_path: Path) -> None:
    capture_dataset(settings(llama, data, tmp_path / "out"))
    for item in CapturedDataset(tmp_path / "out"):
        assert not item["topk_logits"].isnan().any()
        assert (item["topk_ids"] >= 0).all()


def test_a_p_so_small_that_one_token_reaches_it_keeps_one(llama: Path, data: Path, tmp_path: Path) -> None:
    capture_dataset(settings(llama, data, tmp_path / "out", top_logits_p=1e-6))
    for item in CapturedDataset(tmp_path / "out"):
        assert (item["topk_ids"] >= 0).sum(1).tolist() == [1] * len(item["topk_ids"])


@pytest.mark.parametrize("p", [P, 1.0])
def test_the_probability_that_is_kept_is_in_summary_manifest_and_report(
    p: float, llama: Path, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    summary = capture_dataset(settings(llama, data, out, top_logits_p=p))
    dataset = CapturedDataset(out)
    kept = []
    for item, probabilities in zip(dataset, plain_probabilities(llama, dataset), strict=True):
        for t, row in enumerate(probabilities):
            kept.append(float(row[item["topk_ids"][t][item["topk_ids"][t] >= 0].long()].sum()))
    assert summary.top_logits_share == pytest.approx(np.mean(kept), abs=1e-4)
    assert summary.top_logits_quantiles == {
        share: pytest.approx(np.quantile(kept, float(share)), abs=1e-4) for share in ("0.05", "0.5", "0.95")
    }
    counts = json.loads((out / "manifest.json").read_text())["counts"]
    assert counts["top_logits_share"] == summary.top_logits_share
    assert counts["top_logits_quantiles"] == summary.top_logits_quantiles
    assert dataset.description.json["top_logits_p"] == p
    page = write_report(out, tmp_path / "report.html").html.read_text()
    assert f"hold {100 * float(np.mean(kept)):.1f} % of the probability on average" in page


def test_the_command_says_how_much_of_the_rows_is_kept(llama: Path, data: Path, tmp_path: Path) -> None:
    arguments = ["--model", llama, "--data", data, "--out", tmp_path / "out", "--layer-ids", "1", "--exact"]
    shown = CliRunner().invoke(capture, [*map(str, arguments), "--top-logits", "5", "--top-logits-p", "0.9"])
    assert shown.exit_code == 0, shown.output
    assert "in the median row, at most" in shown.output


def test_a_folder_goes_on_with_its_own_cut_alone(llama: Path, data: Path, tmp_path: Path) -> None:
    assert capture_dataset(settings(llama, data, tmp_path / "out", top_logits_p=P)).captured == len(CHATS)
    with pytest.raises(UsageError, match=r"top_logits_p: 0\.4 -> 1\.0"):
        capture_dataset(settings(llama, data, tmp_path / "out"))


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"top_logits_p": 0.0}, "top_logits_p must lie above 0 and at most at 1"),
        ({"top_logits_p": 1.5}, "top_logits_p must lie above 0 and at most at 1"),
        ({"top_logits_p": float("nan")}, "top_logits_p must lie above 0"),
        ({"top_logits_p": 0.5, "top_logits": 0}, "give top_logits"),
    ],
)
def test_a_cut_that_is_none_is_refused(wrong: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=text):
        settings(tmp_path, tmp_path, tmp_path, **wrong)
