"""A model that does not fit is refused before its weights are read, with what it needs and what is free."""

from pathlib import Path

import pytest
import torch

from hiddentap.models import loading_memory
from hiddentap.models.loading import ModelSource, load_model
from hiddentap.models.loading_memory import ModelTooLargeError
from support import tiny
from support.model_folder import llama_folder
from support.published import Form, float8_blocks, fp8_config, publish

MATRICES = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192)


def free(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(loading_memory, "available_bytes", lambda _: count)


def test_dequantized_weights_count_in_the_dtype_they_are_computed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.build_llama(hidden_size=64, intermediate_size=192).to(torch.bfloat16)
    folder = publish(tmp_path, model, Form(float8_blocks(), fp8_config())).folder
    heads = {p.shape for n, p in model.named_parameters() if "k_proj" in n}
    assert heads == {(32, 64)}
    need = 2 * MATRICES
    free(monkeypatch, need - 1)
    with pytest.raises(
        ModelTooLargeError, match=rf"\(fp8 .* needs {need / 1e6:.2f} MB .* {(need - 1) / 1e6:.2f} MB is free"
    ):
        load_model(ModelSource(str(folder), device="cpu"))
    free(monkeypatch, need)
    assert load_model(ModelSource(str(folder), device="cpu")).form.method == "fp8"


def test_fused_experts_count_and_mapped_weights_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.build("deepseek_v3", dtype=torch.bfloat16).save_pretrained(tmp_path)
    # Three layers of four experts; their routers are stored in float32 and converted too.
    experts = 2 * 3 * (4 * 3 * 32 * 32 + 4 * 32)
    free(monkeypatch, experts - 1)
    with pytest.raises(ModelTooLargeError, match=f"needs {experts / 1e6:.2f} MB"):
        load_model(ModelSource(str(tmp_path), device="cpu"))
    free(monkeypatch, experts)
    load_model(ModelSource(str(tmp_path), device="cpu"))


def test_mapped_weights_need_no_memory_and_another_dtype_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = llama_folder(tmp_path / "model")
    free(monkeypatch, 0)
    load_model(ModelSource(str(folder), device="cpu"))
    with pytest.raises(ModelTooLargeError, match="is free, a container's limit included"):
        load_model(ModelSource(str(folder), device="cpu", dtype="bfloat16"))


def test_a_model_that_is_spread_over_devices_needs_room_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.build("deepseek_v3", dtype=torch.bfloat16).save_pretrained(tmp_path)
    experts = 2 * 3 * (4 * 3 * 32 * 32 + 4 * 32)
    spread = ModelSource(str(tmp_path), device_map="cpu")
    monkeypatch.setattr(loading_memory, "accelerator_bytes", lambda: 10)
    free(monkeypatch, experts - 11)
    with pytest.raises(ModelTooLargeError, match="Capture with --stream-weights, which holds two layers at a time"):
        load_model(spread)
    free(monkeypatch, experts - 10)
    load_model(spread)
