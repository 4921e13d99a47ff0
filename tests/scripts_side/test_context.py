"""What a drafter takes from a capture, and what cannot be served."""

from pathlib import Path

import click
import pytest
import torch
from torch import nn
from train_drafter import mask_token
from training.context import channel_scale, read_head, target_layer_ids
from training.drafter import start_like
from transformers import AutoModelForCausalLM

from hiddentap import CapturedDataset
from support.captured import captured


def test_layer_ids_are_those_that_transformers_counts(tmp_path: Path, target: Path, out: Path) -> None:
    assert target_layer_ids(CapturedDataset(out)) == [0, 2, 4]
    same = captured(target, tmp_path / "out", layer_ids=(1, 3, 5), convention="boundary")
    assert target_layer_ids(CapturedDataset(same)) == [0, 2, 4]


@pytest.mark.parametrize(("convention", "ids"), [("layer_output", (2, 5)), ("boundary", (0, 2))])
def test_embeddings_and_the_last_layer_are_refused(
    tmp_path: Path, target: Path, convention: str, ids: tuple[int, ...]
) -> None:
    dataset = CapturedDataset(captured(target, tmp_path / "out", layer_ids=ids, convention=convention))
    with pytest.raises(click.ClickException, match="outputs of layers 0 to 4"):
        target_layer_ids(dataset)


def test_the_head_is_the_models_own(target: Path, out: Path) -> None:
    head = read_head(out / "head")
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    assert torch.equal(head.lm_head, model.lm_head.weight)
    assert torch.equal(head.embeddings.weight, model.model.embed_tokens.weight)
    assert head.config.num_hidden_layers == 6


def test_channel_sizes_are_medians_without_first_rows() -> None:
    rows = torch.tensor([[[1000.0, 1.0]], [[1.0, -2.0]], [[-3.0, 0.0]], [[5.0, 8.0]]])
    pack = {"aux_hidden_states": rows, "position_ids": torch.tensor([0, 1, 2, 3])}
    assert channel_scale([pack]).tolist() == [3.0, 2.0]
    pack["aux_hidden_states"] = torch.zeros(4, 1, 2)
    assert channel_scale([pack]).tolist() == pytest.approx([1e-3, 1e-3])


def test_the_drafters_norm_starts_with_the_targets_gains() -> None:
    class OnePlus(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([1.0, -0.5]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / x.square().mean(-1, keepdim=True).sqrt() * (1 + self.weight)

    norm = nn.RMSNorm(2)
    start_like(norm, OnePlus())
    assert norm.weight.tolist() == [2.0, 0.5]


def test_the_mask_token_is_the_smallest_id_that_does_not_occur() -> None:
    assert mask_token(None, torch.tensor([0, 1, 3, 4])) == 2
    assert mask_token(None, torch.tensor([0, 1])) == 2
    assert mask_token(77, torch.tensor([0, 1])) == 77
