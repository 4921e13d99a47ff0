"""A data set whose samples lie on both sides of a length at which the model computes a whole batch otherwise."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hiddentap.capture.run import CaptureSettings, capture_dataset
from hiddentap.capture.store import CapturedDataset
from hiddentap.models.loading import ModelSource
from support.architectures import build, token_ids

ROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@torch.no_grad()
def rows_alone(model: Any, ids: torch.Tensor, layer: int) -> torch.Tensor:
    seen: list[torch.Tensor] = []

    def take(_module: Any, _args: Any, out: Any) -> None:
        state = out[0] if isinstance(out, tuple) else out
        seen.append(state[0].clone())

    handle = model.model.layers[layer].register_forward_hook(take)
    model(ids[None], use_cache=False)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("family", ["phi3", "llama"])
def test_batches_end_at_the_length_and_every_row_is_that_of_its_sample_alone(family: str, tmp_path: Path) -> None:
    own = {} if family == "llama" else {"original_max_position_embeddings": 64}
    model = build(family, rope_parameters=dict(ROPE), max_position_embeddings=256, **own)
    captured_as_alone(model, range(58, 71), tmp_path)


@pytest.mark.parametrize("family", ["glm_moe_dsa", "deepseek_v32", "axk2"])
def test_samples_past_the_budget_of_sparse_attention_run_alone_and_shorter_ones_together(
    family: str, tmp_path: Path
) -> None:
    captured_as_alone(build(family, index_topk=16), range(9, 24), tmp_path)


def captured_as_alone(model: Any, lengths: range, tmp_path: Path) -> None:
    """Capture a sample of each length in batches and compare its rows with those of a forward of its own."""
    model.save_pretrained(tmp_path / "model")
    records = [{"input_ids": token_ids(1, length, seed=length).tolist()[0]} for length in lengths]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, records)))
    settings = CaptureSettings(
        model=ModelSource(str(tmp_path / "model")),
        data=(str(tmp_path / "rows.jsonl"),),
        out=tmp_path / "out",
        layer_ids=(1,),
        batch_tokens=2048,
    )
    assert capture_dataset(settings).captured == len(lengths)
    for sample in CapturedDataset(tmp_path / "out"):
        expected = rows_alone(model, sample["input_ids"].long(), 1)
        torch.testing.assert_close(sample["aux_hidden_states"][:, 0], expected, atol=1e-4, rtol=1e-4)
