"""A checkpoint in a form that nothing here reads rightly is refused by name; the others mean what they say."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from hiddentap.models.checkpoint import CheckpointError
from hiddentap.models.loading import LoadedModel, ModelLoadError, ModelSource, describe_model, load_model
from hiddentap.models.published_form import PublishedFormError, published_form
from hiddentap.models.stored_tensors import place, stored_tensors
from support import tiny
from support.model_folder import llama_folder
from support.published import (
    Form,
    Published,
    as_k25_is_published,
    compressed_config,
    float8_blocks,
    float8_rows,
    float8_tensor,
    fp8_config,
    int4_packed,
    int8_rows,
    mxfp4,
    nvfp4,
    publish,
)


def llama(**fields: object) -> nn.Module:
    return tiny.build_llama(**{"hidden_size": 64, "intermediate_size": 192, **fields}).to(torch.bfloat16)


def load(folder: Path, **fields: object) -> LoadedModel:
    return load_model(ModelSource(str(folder), device="cpu", **fields))


def require_same_values(published: Published, loaded: LoadedModel) -> None:
    """Every parameter and every state is that of the plain weights, bit for bit."""
    plain = AutoModelForCausalLM.from_pretrained(published.plain).eval()
    found = dict(loaded.model.named_parameters())
    assert [n for n, p in plain.named_parameters() if not torch.equal(found[n], p)] == []
    ids = tiny.token_ids(1, 12)
    with torch.no_grad():
        states, expected = (m(ids, output_hidden_states=True).hidden_states for m in (loaded.model, plain))
    assert all(torch.equal(one, other) for one, other in zip(states, expected, strict=True))


UNQUANTIZED = "no quantization_config: they would be taken for plain numbers"


@pytest.mark.parametrize(
    "quantize",
    [float8_blocks(), float8_blocks(scale_name="scale"), float8_tensor, float8_rows, int8_rows, int4_packed()],
    ids=["float8 blocks", "scales called scale", "float8 and input_scale", "float8 rows", "int8 rows", "packed"],
)
def test_quantized_weights_without_a_word_of_it_in_the_config_are_refused(quantize: object, tmp_path: Path) -> None:
    published = publish(tmp_path, llama(), Form(quantize, None))
    with pytest.raises(PublishedFormError, match=UNQUANTIZED):
        load(published.folder)
    with pytest.raises(PublishedFormError, match=UNQUANTIZED):
        describe_model(ModelSource(str(published.folder)))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("self_attn.q_proj.weight_scale", torch.ones(1)),
        ("self_attn.q_proj.input_scale", torch.ones(1)),
        ("self_attn.q_proj.weight_scale_2", torch.ones(1)),
        ("self_attn.q_proj.zero_point", torch.ones(1)),
        ("self_attn.q_proj.qzeros", torch.ones(2, 2, dtype=torch.int32)),
        ("self_attn.q_proj.g_idx", torch.ones(2, dtype=torch.int32)),
        ("mlp.up_proj.weight", torch.ones(192, 64, dtype=torch.int8)),
        ("mlp.up_proj.weight", torch.ones(192, 64).to(torch.float8_e5m2)),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value.dtype),
)
def test_one_tensor_of_a_quantizer_is_enough(name: str, tensor: torch.Tensor, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors") | {f"model.layers.0.{name}": tensor}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PublishedFormError, match=rf"such as model\.layers\.0\.{name.replace('.', '[.]')}"):
        load(tmp_path)


def test_pickled_weights_are_looked_at_too(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"].to(torch.float8_e4m3fn)
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(PublishedFormError, match=r"up_proj\.weight \(F8_E4M3, shape \[192, 64\]\)"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("config", "files", "words"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, {}, "NVIDIA Model-Optimizer's NVFP4"),
        ({"quant_method": "modelopt_fp4"}, {}, "NVIDIA Model-Optimizer's modelopt_fp4"),
        (
            None,
            {"hf_quant_config.json": {"quantization": {"quant_algo": "FP8"}}},
            r"Model-Optimizer \(FP8 in hf_quant_config",
        ),
        ({"group_size": 64, "bits": 4}, {}, "MLX"),
        ({"quant_method": "exl3", "bits": 4}, {}, "'exl3'"),
        ({"quant_method": "of_its_own"}, {}, "'of_its_own'"),
        ({"bits": 4}, {}, "'a method without a name'"),
    ],
    ids=["modelopt", "modelopt_fp4", "hf_quant_config alone", "mlx", "exl3", "unknown", "no method"],
)
def test_a_method_that_transformers_would_skip_is_refused_with_the_way_out(
    config: dict | None, files: dict, words: str, tmp_path: Path
) -> None:
    published = publish(tmp_path, llama(), Form(float8_tensor, config, files=files))
    with pytest.raises(
        PublishedFormError, match=rf"{words}.* Take the unquantized release, or one in a form"
    ) as caught:
        load(published.folder)
    assert "\n" not in str(caught.value)


def test_mlx_says_quantization_without_config(tmp_path: Path) -> None:
    def as_mlx_writes(config: dict) -> None:
        config["quantization"] = {"group_size": 64, "bits": 4}

    published = publish(tmp_path, llama(), Form(float8_tensor, None), edit=as_mlx_writes)
    with pytest.raises(PublishedFormError, match="MLX"):
        load(published.folder)


@pytest.mark.parametrize(
    ("method", "package"), [("gptq", "gptqmodel"), ("awq", "gptqmodel"), ("quark", "amd-quark"), ("hqq", "hqq")]
)
def test_a_quantizer_that_is_not_installed_is_named(method: str, package: str, tmp_path: Path) -> None:
    published = publish(tmp_path, llama(), Form(float8_tensor, {"quant_method": method, "bits": 4}))
    with pytest.raises(
        PublishedFormError, match=rf"{method}, which needs the package {package}: pip install {package}"
    ):
        load(published.folder)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("model-q4.gguf", "GGUF"),
        ("adapter_config.json", "adapter without its base"),
        ("params.json", "maker's own layout"),
    ],
)
def test_a_folder_without_a_config_says_what_it_holds(file: str, words: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(ModelLoadError, match=rf"has no config\.json; it holds .*{words}"):
        load(tmp_path)


def test_a_gguf_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match="GGUF"):
        load(tmp_path / "model.gguf")


def test_gguf_weights_beside_a_config_are_named(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "model-q4.gguf")
    with pytest.raises(CheckpointError, match="GGUF"):
        load(folder)


@pytest.mark.parametrize("width", [192, 160, 300, 448, 256], ids=lambda width: f"{width} rows")
def test_fp8_blocks_have_the_size_that_the_config_gives(width: int, tmp_path: Path) -> None:
    published = publish(tmp_path, llama(intermediate_size=width), Form(float8_blocks(), fp8_config()))
    require_same_values(published, load(published.folder))


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "minimax_m2", "glm4_moe"])
def test_fp8_experts_in_blocks_that_do_not_fill_their_matrices(family: str, tmp_path: Path) -> None:
    moe = {
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "head_dim": 8,
    }
    model = tiny.build("deepseek_v3") if family == "deepseek_v3" else tiny.build_type(family, **moe)
    published = publish(tmp_path, model.to(torch.bfloat16), Form(float8_blocks((24, 16)), fp8_config((24, 16))))
    require_same_values(published, load(published.folder))


def test_the_values_of_a_scale_for_each_matrix(tmp_path: Path) -> None:
    def quantize(weight: torch.Tensor) -> tuple[dict, torch.Tensor]:
        parts, meant = float8_tensor(weight)
        return {"weight": parts["weight"], "weight_scale_inv": parts["weight_scale"]}, meant

    published = publish(tmp_path, llama(), Form(quantize, fp8_config(None)))
    require_same_values(published, load(published.folder))


@pytest.mark.parametrize(
    "build", [llama, lambda: tiny.build("deepseek_v3", dtype=torch.bfloat16)], ids=["dense", "fused experts"]
)
def test_a_weight_that_was_dequantized_wrongly_is_found(
    build: Callable[[], nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = publish(tmp_path, build(), Form(float8_blocks((16, 16)), fp8_config((16, 16))))
    right = Fp8Dequantize._dequantize_one
    monkeypatch.setattr(Fp8Dequantize, "_dequantize_one", lambda *args, **kw: right(*args, **kw) * 1.05)
    with pytest.raises(
        PublishedFormError, match=r"weight was loaded as another weight than its file means by it \(fp8"
    ):
        load(published.folder)


def test_only_wrong_experts_are_found_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build("deepseek_v3", dtype=torch.bfloat16)
    published = publish(tmp_path, model, Form(float8_blocks((16, 16)), fp8_config((16, 16))))
    right = Fp8Dequantize.convert

    def wrong_experts(self: object, inputs: dict, **kw: object) -> dict:
        found = right(self, inputs, **kw)
        return {k: [t * 1.05 for t in v] if isinstance(v, list) else v for k, v in found.items()}

    monkeypatch.setattr(Fp8Dequantize, "convert", wrong_experts)
    with pytest.raises(PublishedFormError, match=r"experts\.0\.[a-z]+_proj\.weight was loaded as another weight"):
        load(published.folder)


def test_scales_that_nothing_used_are_refused(tmp_path: Path) -> None:
    published = publish(tmp_path, llama(), Form(float8_blocks((16, 16)), fp8_config((16, 16))))
    weights = load_file(published.folder / "model.safetensors") | {"model.layers.1.mlp.up_proj.qzeros": torch.zeros(4)}
    save_file(weights, published.folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        PublishedFormError, match=r"1 scales or zero points .* used by nothing \(model\.layers\.1\.mlp\.up_proj\.q"
    ):
        load(published.folder)


@pytest.mark.parametrize("name", ["self_attn.q_proj.bias", "self_attn.q_norm.weight"])
def test_a_weight_of_a_decoder_layer_without_a_place_in_it_is_refused(name: str, tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "model")
    weights = load_file(folder / "model.safetensors") | {f"model.layers.1.{name}": torch.ones(32)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"1 weights .* belong to decoder layers of LlamaForCausalLM, which has no place"
    ):
        load(folder)


def test_the_form_is_told_in_words_with_its_size_on_disk(tmp_path: Path) -> None:
    published = publish(tmp_path, llama(), Form(float8_blocks(), fp8_config()))
    form = load(published.folder).form
    assert str(form) == "fp8 (e4m3, blocks of 128 x 128), BF16, F32, F8_E4M3"
    assert form.bytes_on_disk == (published.folder / "model.safetensors").stat().st_size
    assert str(load(published.plain).form) == "unquantized, BF16"


def test_dequantized_weights_are_told_and_plain_ones_are_not(tmp_path: Path) -> None:
    published = publish(tmp_path, llama(), Form(float8_blocks(), fp8_config()))
    told = {"method": "fp8", "weights": "dequantized", "activations": "not rounded"}
    assert load(published.folder).published == {"quantization": told}
    assert load(published.plain).published == {}


def test_headers_list_the_tensors_of_every_file(tmp_path: Path) -> None:
    tiny.build("llama").save_pretrained(tmp_path, max_shard_size="40KB")
    (tmp_path / "consolidated.safetensors").write_bytes(b"another layout of the same weights, which nobody opens")
    found = stored_tensors(tmp_path)
    expected = {
        name: ("F32", tuple(tensor.shape))
        for path in tmp_path.glob("model-*.safetensors")
        for name, tensor in load_file(path).items()
    }
    assert {name: (stored.dtype, stored.shape) for name, stored in found.items()} == expected


def test_a_config_of_no_method_is_of_no_form(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": None}))
    assert published_form(folder, load(folder).model.config).method is None


COMPRESSED = {
    "FP8 of channels": (
        float8_rows,
        compressed_config(
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "channel"},
            activations={"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        ),
    ),
    "W8A8": (
        int8_rows,
        compressed_config(
            "int-quantized",
            {"num_bits": 8, "type": "int", "strategy": "channel"},
            activations={"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
        ),
    ),
    "W4A16": (
        int4_packed(16),
        compressed_config("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}),
    ),
}


@pytest.mark.parametrize(
    ("scheme", "family"),
    [
        ("FP8 of channels", "llama"),
        ("W8A8", "llama"),
        ("W4A16", "llama"),
        ("FP8 of channels", "deepseek_v3"),
        ("W4A16", "deepseek_v3"),
    ],
)
def test_compressed_tensors_are_dequantized(scheme: str, family: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="see tests/requirements-peers.txt")
    quantize, config = COMPRESSED[scheme]
    published = publish(tmp_path, tiny.build(family, dtype=torch.bfloat16), Form(quantize, config))
    require_same_values(published, load(published.folder))


FOUR_BITS = {
    "NVFP4A16": (nvfp4, "nvfp4-pack-quantized", {"strategy": "tensor_group", "group_size": 16}),
    "MXFP4": (mxfp4, "mxfp4-pack-quantized", {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}),
}
# The last three: matrices of a tiny DeepSeek-V3 that are too narrow for a group.
WIDE = ("embed", "lm_head", "norm", "mlp.gate.weight", "kv_a", "kv_b", "q_b")


def in_four_bits(scheme: str) -> Form:
    quantize, form, weights = FOUR_BITS[scheme]
    return Form(quantize, compressed_config(form, {"num_bits": 4, "type": "float", **weights}), keeps=WIDE)


@pytest.mark.parametrize(("scheme", "family"), [("NVFP4A16", "llama"), ("MXFP4", "llama"), ("MXFP4", "deepseek_v3")])
def test_floats_of_four_bits_are_dequantized(scheme: str, family: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="see tests/requirements-peers.txt")
    published = publish(tmp_path, tiny.build(family, dtype=torch.bfloat16), in_four_bits(scheme))
    require_same_values(published, load(published.folder))


def test_experts_whose_common_scale_transformers_leaves_out_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="see tests/requirements-peers.txt")
    published = publish(tmp_path, tiny.build("deepseek_v3", dtype=torch.bfloat16), in_four_bits("NVFP4A16"))
    with pytest.raises(PublishedFormError, match=r"experts\.0\.[a-z]+_proj\.weight was loaded as another weight"):
        load(published.folder)


def test_what_transformers_cannot_convert_is_refused_with_its_form(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="see tests/requirements-peers.txt")
    quantize, config = COMPRESSED["W8A8"]
    published = publish(tmp_path, tiny.build("deepseek_v3", dtype=torch.bfloat16), Form(quantize, config))
    with pytest.raises(
        ModelLoadError, match=r"cannot turn its stored weights into .*deepseek_v3 \(compressed-tensors \(int-quantized"
    ):
        load(published.folder)


def test_anchored_patterns_of_what_is_left_out_do_not_keep_weights_from_loading(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="see tests/requirements-peers.txt")
    scheme = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8}
    ignore = ("re:language_model.lm_head", "re:vision_tower.*", "re:mm_projector.*")
    config = compressed_config("pack-quantized", scheme, ignore=ignore)
    model = tiny.build_kimi_k25().to(torch.bfloat16)

    def nested(fields: dict) -> None:
        fields["text_config"]["quantization_config"] = fields.pop("quantization_config")

    kept = ("embed", "lm_head", "norm", "mlp.gate.weight", "vision", "projector", "merger")
    published = publish(
        tmp_path, model, Form(int4_packed(8), config, keeps=kept), edit=nested, rename=as_k25_is_published
    )
    found = {place(name): p for name, p in load(published.folder).model.named_parameters() if "language_model" in name}
    meant = {
        n: w
        for n, w in load_file(published.plain / "model.safetensors").items()
        if n.startswith("language_model.model.layers")
    }
    single = {n: w for n, w in meant.items() if ".experts." not in n and n.endswith(".weight")}
    assert len(single) > 30
    assert [n for n, w in single.items() if not torch.equal(found[place(n)], w)] == []
    for layer, expert in ((1, 0), (3, 2)):
        prefix, fused = f"language_model.model.layers.{layer}.mlp.experts", f"layers.{layer}.mlp.experts"
        gate, up, down = (meant[f"{prefix}.{expert}.{kind}_proj.weight"] for kind in ("gate", "up", "down"))
        assert torch.equal(found[f"{fused}.gate_up_proj"][expert], torch.cat([gate, up]))
        assert torch.equal(found[f"{fused}.down_proj"][expert], down)
