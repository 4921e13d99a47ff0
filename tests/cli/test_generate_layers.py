"""`hiddentap generate` with layers named in other ways than by plain ids, and with models that need an adapter."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from hiddentap import CapturedDataset
from support import kimi_k3
from support.architectures import build
from support.generation import PlainForward, row_error
from support.model_folder import VOCAB, llama_folder, model_folder, write_rows
from support.recorder import layer_calls, record

ROWS = [{"id": "text", "text": "Once upon a time"}, {"id": "ids", "input_ids": [60, 61, 62]}]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(run: Run) -> Run:
    return partial(run, "generate")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of twelve layers: defaults of algorithms need that many."""
    return llama_folder(tmp_path_factory.mktemp("llama"), num_hidden_layers=12)


def answered(run: Run, model: Path, tmp_path: Path, *options: object) -> CapturedDataset:
    data = write_rows(tmp_path / "prompts.jsonl", ROWS)
    common = ("--model", model, "--data", data, "--out", tmp_path / "out", "--max-new-tokens", 5, "--ignore-eos")
    code, _, err = run(*common, "--final", "none", *options)
    assert code == 0, err
    return CapturedDataset(tmp_path / "out")


def draft_config(tmp_path: Path, **fields: Any) -> Path:
    path = tmp_path / "draft.json"
    path.write_text(json.dumps(fields))
    return path


WAYS = {
    # vLLM's ids of EAGLE-3 are states after so many layers; it adds 1 to those of DFlash.
    "vLLM's ids": (("--layer-ids", "2,6,9", "--ids-of", "vllm"), {}, [1, 5, 8]),
    "a config of EAGLE-3, read by vLLM": (("--ids-of", "vllm"), {"eagle_aux_hidden_state_layer_ids": [2, 6, 9]}, [1, 5, 8]),
    "a config of DFlash, read by vLLM": (("--ids-of", "vllm"), {"dflash_config": {"target_layer_ids": [1, 9]}}, [1, 9]),
    "a config in a text_config": (
        ("--ids-of", "layer_output"), {"text_config": {"target_layer_ids": [0, 11]}}, [0, 11],
    ),
    "an algorithm": (("--algorithm", "eagle3"), {}, [1, 5, 8]),
    "an algorithm of vLLM": (("--algorithm", "eagle3", "--ids-of", "vllm"), {}, [1, 5, 8]),
}  # fmt: skip


@pytest.mark.parametrize(("options", "config", "layers"), WAYS.values(), ids=WAYS)
def test_layers_named_in_each_way_are_those_of_a_plain_forward(
    options: tuple[str, ...], config: dict[str, Any], layers: list[int], run: Run, llama: Path, tmp_path: Path
) -> None:
    named = ("--draft-config", draft_config(tmp_path, **config)) if config else ()
    dataset = answered(run, llama, tmp_path, *options, *named)
    model = AutoModelForCausalLM.from_pretrained(llama)
    for i in range(2):
        item = dataset[i]
        expected = PlainForward(model, item["input_ids"].tolist()).layers(layers)
        assert row_error(item["aux_hidden_states"], expected) < 1e-5
    assert dataset.metadata["taps"]["boundaries"] == [layer + 1 for layer in layers]


REFUSED = {
    "a config without a system": ((), {"target_layer_ids": [1]}, "a draft config does not say what its ids mean"),
    "a config for another depth": (
        ("--ids-of", "vllm"), {"dflash_config": {"target_layer_ids": [1]}, "num_target_layers": 36},
        "is for a target of 36 decoder layers",
    ),
    "two ways at once": (
        ("--layer-ids", "1", "--ids-of", "vllm"), {"target_layer_ids": [1]}, r"named in 2 ways \(ids, draft_config\)",
    ),
    "a config without ids": (("--ids-of", "vllm"), {"hidden_size": 7}, "has no field with target layers"),
    "an unknown algorithm": (("--algorithm", "eagle9"), {}, "'eagle9' is not one of"),
    "an id that vLLM has not": (("--layer-ids", "13", "--ids-of", "vllm"), {}, "13"),
    "an id too high for EAGLE-3": (("--algorithm", "dspark", "--ids-of", "vllm"), {}, "vllm"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "config", "told"), REFUSED.values(), ids=REFUSED)
def test_layers_that_cannot_be_told_are_refused_before_anything_is_written(
    options: tuple[str, ...], config: dict[str, Any], told: str, run: Run, llama: Path, tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "prompts.jsonl", ROWS)
    named = ("--draft-config", draft_config(tmp_path, **config)) if config else ()
    code, _, err = run("--model", llama, "--data", data, "--out", tmp_path / "out", *options, *named)
    assert code == 2
    assert re.search(told, err), err
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def with_adapter(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of models whose layers hand on more than one stream: DeepSeek-V4, and a double of Kimi K3."""
    AutoConfig.register("kimi_k3_double", kimi_k3.KimiK3Config, exist_ok=True)
    AutoModelForCausalLM.register(kimi_k3.KimiK3Config, kimi_k3.KimiK3ForCausalLM, exist_ok=True)
    place = tmp_path_factory.mktemp("adapters")
    return {
        "attention_residuals": model_folder(place / "k3", kimi_k3.build(vocab_size=VOCAB)),
        "hyper_connections": model_folder(place / "v4", build("deepseek_v4", index_topk=64, vocab_size=VOCAB)),
    }


@torch.no_grad()
def plain_rows(model: Any, adapter: str, ids: list[int], layer: int) -> Tensor:
    """(S, H) after `layer` in one forward over `ids`, from a record of every module."""
    recorder, _ = record(model, torch.tensor([ids]), use_cache=False)
    if adapter == "attention_residuals.mixture":
        (norm,) = recorder.of(f"model.layers.{layer + 1}.input_layernorm")
        return norm.inputs["[0]"][0]
    state = next(iter(layer_calls(recorder, "model.layers")[layer].outputs.values()))
    if adapter == "hyper_connections.mean":
        return state.mean(2)[0]
    return state.flatten(2)[0] if state.ndim == 4 else state[0]


@pytest.mark.parametrize(
    "adapter",
    [
        "attention_residuals.prefix",
        "attention_residuals.mixture",
        "hyper_connections.mean",
        "hyper_connections.streams",
    ],
)
def test_a_model_that_needs_an_adapter_is_refused_without_and_right_with_it(
    adapter: str, with_adapter: dict[str, Path], run: Run, tmp_path: Path
) -> None:
    model = with_adapter[adapter.partition(".")[0]]
    data = write_rows(tmp_path / "p.jsonl", ROWS)
    code, _, err = run("--model", model, "--data", data, "--layer-ids", "0,2", "--out", tmp_path / "none")
    assert (code, adapter in err) == (1, True), err
    dataset = answered(run, model, tmp_path, "--layer-ids", "0,2", "--adapter", adapter)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    for i in range(2):
        item = dataset[i]
        ids = item["input_ids"].tolist()
        expected = torch.stack([plain_rows(loaded, adapter, ids, layer) for layer in (0, 2)], 1)
        assert row_error(item["aux_hidden_states"], expected) < 1e-5
    assert dataset.metadata["taps"]["adapter"] == adapter
