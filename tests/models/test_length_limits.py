"""Lengths at which all rows change are read from what rotary modules give, however long they are."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from hiddentap.models.config import named_lengths
from hiddentap.models.length_limits import LengthLimits, length_limits
from support.architectures import build

LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


def llama(rope: dict[str, Any], positions: int) -> Any:
    return build("llama", rope_parameters=rope, max_position_embeddings=positions)


@pytest.mark.parametrize("original", [64, 4096])
def test_longrope_cuts_at_the_length_that_it_was_first_trained_for(original: int) -> None:
    model = llama(LONG | {"original_max_position_embeddings": original}, 131072)
    assert length_limits(model) == LengthLimits((original,), None)


@pytest.mark.parametrize("family", ["phi3", "phimoe"])
def test_families_that_choose_by_the_largest_position_are_found(family: str) -> None:
    rope = LONG | {"original_max_position_embeddings": 64}
    if family == "phimoe":
        rope |= {"short_mscale": 1.0, "long_mscale": 1.2}
    model = build(family, rope_parameters=rope, original_max_position_embeddings=64, max_position_embeddings=256)
    assert length_limits(model).cuts == (64,)


def test_dynamic_frequencies_are_unsteady_past_the_positions_of_the_config() -> None:
    model = llama({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}, 256)
    assert length_limits(model) == LengthLimits((256,), 256)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 10000.0,
         "original_max_position_embeddings": 64},
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_frequencies_that_stay_have_no_limits(rope: dict[str, Any]) -> None:
    assert length_limits(llama(rope, 256)) == LengthLimits()


@pytest.mark.parametrize("family", ["gpt2", "mamba2", "gemma2", "gpt_oss", "qwen3_next", "bloom"])
def test_other_models_have_none(family: str) -> None:
    assert length_limits(build(family)) == LengthLimits()


def test_asking_changes_no_module() -> None:
    model = llama({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}, 16)
    rotary = model.model.rotary_emb
    before = {name: buffer.clone() for name, buffer in rotary.named_buffers()}
    length_limits(model)
    assert rotary.max_seq_len_cached == 16
    assert all(torch.equal(before[name], buffer) for name, buffer in rotary.named_buffers())


class OwnCode(nn.Module):
    """A model whose rotary embedding is part of its attention and cannot be asked."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config


@pytest.mark.parametrize("kind", ["longrope", "su", "dynamic"])
def test_a_limit_that_only_the_config_states_is_believed(kind: str) -> None:
    config = LlamaConfig(max_position_embeddings=512)
    config.rope_parameters = {"rope_type": kind, "original_max_position_embeddings": 128}
    assert length_limits(OwnCode(config)).cuts == (128,)


def test_named_lengths_are_those_of_positions_windows_and_chunks() -> None:
    config = LlamaConfig(max_position_embeddings=512, sliding_window=96, attention_chunk_size=48, hidden_size=64)
    config.rope_parameters = {"rope_type": "longrope", "original_max_position_embeddings": 128}
    assert named_lengths(config) == (48, 96, 128, 512)


@pytest.mark.parametrize(
    ("lengths", "width", "held", "fault"),
    [
        ([10, 64], 64, 0, None),
        ([65, 80], 80, 0, None),
        ([64, 65], 65, 0, "found sequences of 64 and 65 positions"),
        ([60, 62], 66, 0, "found sequences of 60 and 66 positions, padding included"),
        ([65], 65, 64, "the cache holds 64 positions with the former ones"),
        ([66], 66, 65, None),
    ],
)
def test_a_forward_stays_on_one_side_of_a_cut(lengths: list[int], width: int, held: int, fault: str | None) -> None:
    found = LengthLimits((64,)).fault(lengths, width, held)
    assert found is None if fault is None else fault in str(found)
