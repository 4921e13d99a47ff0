"""Generation of models whose residual stream needs an adapter, and of layers that are named in other ways than by ids."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hiddentap.capture.sampling import SamplingParams, generate_with_capture
from hiddentap.capture.store import CapturedDataset
from hiddentap.hooks import TapError
from hiddentap.models.adapter_names import AdapterError
from hiddentap.models.errors import UsageError
from support import kimi_k3
from support.cached_steps import model_of
from support.generation import PROMPTS, PlainForward, lively, row_error
from support.recorder import layer_calls, record

PARAMS = SamplingParams(seed=5, temperature=1.5, max_new_tokens=9, ignore_eos=True)
ADAPTERS = [
    "attention_residuals.prefix",
    "attention_residuals.mixture",
    "hyper_connections.mean",
    "hyper_connections.streams",
]


def model_for(adapter: str) -> Any:
    return kimi_k3.build() if adapter.startswith("attention") else model_of("deepseek_v4")


@torch.no_grad()
def plain_rows(model: Any, adapter: str, ids: list[int], layer_id: int) -> Tensor:
    """(S, H) of one layer in one forward over `ids`, read from a record of every module."""
    recorder, _ = record(model, torch.tensor([ids]), use_cache=False)
    if adapter == "attention_residuals.mixture":
        (norm,) = recorder.of(f"model.layers.{layer_id + 1}.input_layernorm")
        return norm.inputs["[0]"][0]
    state = next(iter(layer_calls(recorder, "model.layers")[layer_id].outputs.values()))
    if adapter == "hyper_connections.mean":
        state = state.mean(2)
    return state.flatten(2)[0] if state.ndim == 4 else state[0]


@pytest.mark.parametrize("options", [{}, {"max_batch": 2}], ids=str)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_rows_read_through_an_adapter_are_those_of_a_plain_forward(adapter: str, options: dict[str, Any]) -> None:
    model = model_for(adapter)
    results = generate_with_capture(
        model, PROMPTS[:4], PARAMS, layer_ids=[0, 2], adapter=adapter, final="both", **options
    )
    for result in results:
        assert len(result.token_ids) == 9
        ids = result.rows["input_ids"].tolist()
        expected = torch.stack([plain_rows(model, adapter, ids, i) for i in (0, 2)], 1)
        assert row_error(result.rows["aux_hidden_states"], expected) < 1e-5
        recorder, _ = record(model, torch.tensor([ids]), use_cache=False)
        (norm,) = recorder.of("model.norm")
        assert row_error(result.rows["pre_norm"][:, None], norm.inputs["[0]"][0][:, None]) < 1e-5


def test_shards_of_several_streams_say_their_adapter_and_have_norm_states_of_their_own_width(tmp_path: Path) -> None:
    generate_with_capture(
        model_of("deepseek_v4"), PROMPTS[:2], PARAMS, layer_ids=[1], adapter="hyper_connections.streams", final="pre",
        out=tmp_path / "out",
    )  # fmt: skip
    dataset = CapturedDataset(tmp_path / "out")
    sample = dataset[0]
    assert sample["aux_hidden_states"].shape[1:] == (1, 128)
    assert sample["pre_norm"].shape[1:] == (32,)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["identity"]["taps"]["adapter"] == "hyper_connections.streams"


@pytest.mark.parametrize("adapter", ["attention_residuals.prefix", "hyper_connections.mean"])
def test_without_an_adapter_such_models_are_refused_with_the_names_that_fit(adapter: str) -> None:
    with pytest.raises(TapError, match=f"needs an adapter: .*{adapter}"):
        generate_with_capture(model_for(adapter), [[9, 10]], PARAMS, layer_ids=[1])


def test_an_adapter_that_does_not_fit_is_refused() -> None:
    with pytest.raises(AdapterError, match="have nothing of that kind"):
        generate_with_capture(lively("llama"), [[9]], PARAMS, layer_ids=[1], adapter="attention_residuals.mixture")


@pytest.mark.parametrize(
    ("named", "boundaries"),
    [
        ({"layer_ids": [1, 3], "ids_of": "vllm"}, (1, 3)),
        ({"layer_ids": [0, 2], "ids_of": "specforge"}, (1, 3)),
        ({"layer_ids": [0, 2], "convention": "boundary"}, (0, 2)),
        ({"draft_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}, "ids_of": "vllm"}, (1, 2)),
    ],
    ids=str,
)
def test_layers_are_named_as_in_a_capture(named: dict[str, Any], boundaries: tuple[int, ...], tmp_path: Path) -> None:
    if "draft_config" in named:
        (tmp_path / "config.json").write_text(json.dumps(named["draft_config"]))
        named = named | {"draft_config": tmp_path / "config.json"}
    [result] = generate_with_capture(lively("llama"), [PROMPTS[0]], PARAMS, **named)
    plain = PlainForward(lively("llama"), result.rows["input_ids"].tolist())
    after = [b - 1 for b in boundaries if b > 0]
    found = result.rows["aux_hidden_states"][:, boundaries.index(after[0] + 1) :]
    assert result.rows["aux_hidden_states"].shape[1] == len(boundaries)
    assert row_error(found, plain.layers(after)) < 1e-5


def test_the_default_layers_of_an_algorithm_name_them_too() -> None:
    model, adapter = kimi_k3.build(), "attention_residuals.prefix"
    [result] = generate_with_capture(model, [PROMPTS[1]], PARAMS, algorithm="dspark", adapter=adapter)
    ids = result.rows["input_ids"].tolist()
    expected = torch.stack([plain_rows(model, adapter, ids, i) for i in (1, 2, 3, 4, 5)], 1)
    assert row_error(result.rows["aux_hidden_states"], expected) < 1e-5


def test_layers_named_in_two_ways_are_refused() -> None:
    with pytest.raises(UsageError, match="layers were named in 2 ways"):
        generate_with_capture(lively("llama"), [[9]], PARAMS, layer_ids=[1], algorithm="dflash")
