"""What streamed weights need, as `hiddentap layers` and docs/large-models.md state it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hiddentap.capture.run.engines.hugging_face.streamed import KEPT_STATES, SHARE_FOR_STATES
from hiddentap.models.decoder import find_decoder
from hiddentap.models.stored_tensors import StoredTensor, stored_tensors
from hiddentap.models.streaming import StreamedNeeds
from support import tiny

PAGE = Path(__file__).resolve().parents[2] / "docs" / "large-models.md"


def example() -> tuple[str, str]:
    """The page's example, and what the page says that it prints."""
    code, printed = re.findall(
        r"```(?:python)?\n((?:H, experts|a layer:).*?)```", PAGE.read_text(encoding="utf-8"), re.S
    )
    return code, printed


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    """The names of the page's example."""
    values: dict[str, Any] = {}
    with redirect_stdout(StringIO()):
        exec(example()[0], values)
    return values


@pytest.fixture(scope="module")
def kimi() -> nn.Module:
    """Kimi K2.5's text model by its published config, without weights; two of its 61 layers, one of them dense."""
    config = AutoConfig.for_model(
        "deepseek_v3", vocab_size=163840, hidden_size=7168, num_hidden_layers=2, first_k_dense_replace=1,
        num_attention_heads=64, num_key_value_heads=64, intermediate_size=18432, moe_intermediate_size=2048,
        n_routed_experts=384, n_shared_experts=1, num_experts_per_tok=8, q_lora_rank=1536, kv_lora_rank=512,
        qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def published(model: nn.Module) -> Iterator[StoredTensor]:
    """The second layer as it is published: matrices of experts in 4 bits beside their scales, all else in 16 bits."""
    prefix, file = "language_model.model.layers.1.", Path("model.safetensors")
    for name, parameter in model.model.layers[1].named_parameters():
        if name in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
            values = parameter.numel()
            yield StoredTensor(f"{prefix}{name}.weight_packed", "I32", (values // 8,), file, values // 2)
            yield StoredTensor(f"{prefix}{name}.weight_scale", "BF16", (values // 32,), file, values // 32 * 2)
        else:
            yield StoredTensor(prefix + name, "BF16", tuple(parameter.shape), file, parameter.numel() * 2)


def test_the_page_prints_what_its_example_computes() -> None:
    code, printed = example()
    out = StringIO()
    with redirect_stdout(out):
        exec(code, {})
    assert out.getvalue() == printed


def test_the_pages_figures_are_those_of_the_model_that_it_names(figures: dict[str, Any], kimi: nn.Module) -> None:
    needs = StreamedNeeds.of_skeleton(find_decoder(kimi), published(kimi), itemsize=2)
    assert needs.layer == pytest.approx(
        figures["layer"], rel=1e-4
    )  # norms and the router's bias are left out on the page
    assert needs.outside == pytest.approx(figures["outside"], rel=1e-4)
    assert needs.layers_on_disk[1] == pytest.approx(figures["stored"], rel=1e-4)
    assert needs.memory == 2 * needs.layer + needs.outside


def test_the_pages_blocks_are_those_that_a_run_makes(figures: dict[str, Any]) -> None:
    assert figures["state"] == (3 + 1 + KEPT_STATES) * 7168 * 2
    room = figures["memory"] - figures["outside"] - 2 * figures["layer"]
    assert figures["default"] == pytest.approx(SHARE_FOR_STATES * room / figures["state"])


def test_layers_of_a_vision_tower_and_layers_that_are_not_loaded_are_not_counted(tmp_path: Path) -> None:
    model = tiny.build_llama()
    model.save_pretrained(tmp_path)
    stored = list(stored_tensors(tmp_path).values())
    file = stored[0].file
    others = [
        StoredTensor("vision_tower.layers.0.weight", "F32", (8, 8), file, 256),
        StoredTensor(
            "model.layers.4.eh_proj.weight", "F32", (99, 99), file, 39204
        ),  # a layer that predicts further tokens
    ]
    needs = StreamedNeeds.of_skeleton(find_decoder(model), [*stored, *others], itemsize=4)
    layer = 4 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32 + 2 * 32)
    assert needs.layers_on_disk == (layer,) * 4
    assert needs.layer == layer


def test_a_head_that_is_also_the_embeddings_counts_once() -> None:
    tied = find_decoder(tiny.build_llama(tie_word_embeddings=True))
    apart = find_decoder(tiny.build_llama())
    outside = [StreamedNeeds.of_skeleton(decoder, [], itemsize=4).outside for decoder in (tied, apart)]
    assert outside == [4 * (96 * 32 + 32)] * 2
