"""A checkpoint as it is published is streamed with the bits of a plain run, which are those of the weights that it means."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from hiddentap.models.loading import ModelSource, load_layer_by_layer
from hiddentap.models.published_form import PublishedFormError
from support import tiny
from support.published import (
    Form,
    Published,
    as_k25_is_published,
    compressed_config,
    float8_blocks,
    float8_tensor,
    fp8_config,
    int4_packed,
    nvfp4,
    publish,
    publish_fused_mxfp4,
)
from support.streamed_rows import ALONE, batches_of, rows_of, settings, unequal

BLOCKS = (24, 16)
# What Kimi K2-Thinking and K2.5 leave in 16 bits: all but the routed experts.
SIXTEEN_BITS = ("re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*")
NOT_EXPERTS = (
    "embed",
    "lm_head",
    "norm",
    "mlp.gate.weight",
    "self_attn",
    "shared_experts",
    "layers.0.mlp",
    "blocks.0.mlp",
)
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


def deepseek() -> nn.Module:
    return tiny.build("deepseek_v3", dtype=torch.bfloat16)


def deepseek_v3_fp8(folder: Path) -> Published:
    return publish(folder, deepseek(), Form(float8_blocks(BLOCKS), fp8_config(BLOCKS)))


def kimi_k2_fp8(folder: Path) -> Published:
    return publish(folder, deepseek(), Form(float8_blocks(BLOCKS), fp8_config(BLOCKS)), edit=as_kimi_k2)


def kimi_k2_thinking_int4(folder: Path) -> Published:
    config = compressed_config("pack-quantized", INT4, ignore=("lm_head", *SIXTEEN_BITS))
    return publish(folder, deepseek(), Form(int4_packed(32), config, keeps=NOT_EXPERTS), edit=as_kimi_k2)


def kimi_k25_int4(folder: Path) -> Published:
    ignore = ("re:language_model.lm_head", "re:vision_tower.*", "re:mm_projector.*", *SIXTEEN_BITS)
    form = Form(
        int4_packed(32),
        compressed_config("pack-quantized", INT4, ignore=ignore),
        keeps=(*NOT_EXPERTS, "vision", "projector", "merger"),
    )

    def nested(config: dict[str, Any]) -> None:
        config["text_config"]["quantization_config"] = config.pop("quantization_config")

    model = tiny.build_kimi_k25().to(torch.bfloat16)
    return publish(folder, model, form, edit=nested, rename=as_k25_is_published)


def gpt_oss_mxfp4(folder: Path) -> Published:
    return publish_fused_mxfp4(folder, tiny.build("gpt_oss", dtype=torch.bfloat16))


def llama_nvfp4(folder: Path) -> Published:
    config = compressed_config(
        "nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    )
    model = tiny.build_llama(hidden_size=64, intermediate_size=192).to(torch.bfloat16)
    return publish(folder, model, Form(nvfp4, config))


def as_kimi_k2(config: dict[str, Any]) -> None:
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModelForCausalLM": "modeling_deepseek.X"}
    config |= {"model_type": "kimi_k2", "auto_map": code, "architectures": ["DeepseekV3ForCausalLM"]}


FORMS: dict[str, tuple[Callable[[Path], Published], bool]] = {
    "DeepSeek V3, FP8 blocks": (deepseek_v3_fp8, False),
    "Kimi K2, FP8 blocks": (kimi_k2_fp8, False),
    "Kimi K2-Thinking, INT4 groups": (kimi_k2_thinking_int4, True),
    "Kimi K2.5, INT4 groups": (kimi_k25_int4, True),
    "gpt-oss, MXFP4": (gpt_oss_mxfp4, False),
    "Llama, NVFP4": (llama_nvfp4, True),
}


@pytest.fixture(params=FORMS)
def published(request: pytest.FixtureRequest, tmp_path: Path) -> Published:
    make, needs_compressed_tensors = FORMS[request.param]
    if needs_compressed_tensors:
        pytest.importorskip("compressed_tensors", reason="see tests/requirements-peers.txt")
    return make(tmp_path)


def plain_states(folder: Path, input_ids: Tensor) -> dict[str, Tensor]:
    """Hidden states of a plain forward: (S, 3, H) after layers 0 to 2 of 4, and (S, H) after the final norm."""
    auto = (
        AutoModelForImageTextToText
        if (folder / "config.json").read_text().count('"kimi_k25"')
        else AutoModelForCausalLM
    )
    model = auto.from_pretrained(folder).eval()
    with torch.no_grad():
        states = model(input_ids, output_hidden_states=True, use_cache=False).hidden_states
    assert len(states) == 5
    return {"aux_hidden_states": torch.stack([state[0] for state in states[1:4]], 1), "post_norm": states[4][0]}


def test_streamed_rows_are_those_of_a_plain_run_and_of_the_weights_that_the_files_mean(published: Published) -> None:
    asked: dict[str, Any] = {"layer_ids": [0, 1, 2], "final": "post"}
    plain = rows_of(settings(published.folder, **asked))
    streamed = rows_of(settings(published.folder, stream_weights=True, **asked))
    assert [unequal(a, b) for a, b in zip(plain, streamed, strict=True)] == [[]] * len(plain)
    # Dequantized weights are rounded to bfloat16 as these are, so one sample alone has the same bits.
    for batch, found in zip(batches_of(ALONE), streamed, strict=False):
        expected = plain_states(published.plain, batch.input_ids)
        for name, rows in expected.items():
            assert torch.equal(found[name], rows.float()), name


@pytest.mark.parametrize(("method", "package"), [("gptq", "gptqmodel"), ("awq", "gptqmodel")])
def test_a_form_whose_quantizer_is_missing_is_refused_before_a_weight_is_read(
    method: str, package: str, tmp_path: Path
) -> None:
    form = Form(float8_tensor, {"quant_method": method, "bits": 4})
    folder = publish(tmp_path, tiny.build_llama().to(torch.bfloat16), form).folder
    with pytest.raises(PublishedFormError, match=f"{method}, which needs the package {package}: pip install {package}"):
        load_layer_by_layer(ModelSource(str(folder), device="cpu"))


def test_experts_whose_common_scale_transformers_leaves_out_are_refused_when_streamed_too(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="see tests/requirements-peers.txt")
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    narrow = ("embed", "lm_head", "norm", "mlp.gate.weight", "kv_a", "kv_b", "q_b")
    form = Form(nvfp4, compressed_config("nvfp4-pack-quantized", weights), keeps=narrow)
    folder = publish(tmp_path, deepseek(), form).folder
    with pytest.raises(PublishedFormError, match=r"experts\.0\.[a-z]+_proj\.weight was loaded as another weight"):
        load_layer_by_layer(ModelSource(str(folder), device="cpu"))
