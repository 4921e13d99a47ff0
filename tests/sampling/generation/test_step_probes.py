"""Models whose steps on a cache are not their plain forward are refused by name, before the first token."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hiddentap.capture.sampling import SamplingParams, StepError, generate_with_capture
from hiddentap.capture.sampling.generation.cached_model import CachedModel, cached_model
from hiddentap.capture.sampling.generation.step_probes import StepProbes
from hiddentap.models.layer_choice import LayerChoice
from support.architectures import build
from support.cached_steps import FIELDS, model_of
from support.generation import CountedCalls, hooks_of, lively

TAPPED = [name for name in FIELDS if name not in ("qwen4_exp_text", "deepseek_v4")]
"""The residual stream of the other two has several rows per token, which no tap reads plainly."""
RUNNING_STATE = ["qwen3_next", "kimi_linear", "mamba2", "falcon_h1"]
NOT_SHARED = ["deepseek_v32", "minimax_m3_vl_text"]


def probed(model: Any, action: Callable[[StepProbes], Any]) -> Any:
    ready: CachedModel = cached_model(model, LayerChoice([1, 3]))
    with ready.attached():
        return action(StepProbes(ready))


@pytest.mark.parametrize("name", TAPPED)
def test_right_models_pass(name: str) -> None:
    probed(model_of(name), StepProbes.require_cached_steps)
    probed(model_of(name), StepProbes.require_chunks)


@pytest.mark.parametrize("name", TAPPED)
def test_only_models_whose_cache_goes_back_can_guess(name: str) -> None:
    if name not in RUNNING_STATE:
        probed(model_of(name), StepProbes.require_crop)
        return
    with pytest.raises(StepError, match=f"{type(model_of(name)).__name__} cannot be run with tokens taken back"):
        probed(model_of(name), StepProbes.require_crop)


@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("name", TAPPED)
def test_lengths_share_steps_where_every_layer_of_the_cache_can_be_lined_up(name: str, recording: bool) -> None:
    shares = probed(model_of(name), lambda probes: probes.shares_steps(recording=recording))
    assert shares == (name not in NOT_SHARED)


class Holder(nn.Module):
    """Passes every argument on, so that its signature does not say that position ids are taken."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt2", "cohere2", "mamba"])
def test_lengths_do_not_share_steps_where_the_shorter_one_would_change(name: str, dtype: torch.dtype) -> None:
    model = build(name).to(dtype)
    held = model if name == "mamba" else Holder(model)
    assert not probed(held, lambda probes: probes.shares_steps(recording=False))


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "mamba2", "falcon_h1"])
def test_lengths_share_steps_of_right_models_in_half_precision(name: str) -> None:
    model = build(name).bfloat16()
    assert probed(model, lambda probes: probes.shares_steps(recording=False))


@pytest.mark.parametrize("name", ["mamba", "falcon_mamba", "jamba"])
def test_a_model_that_is_wrong_in_chunks_is_refused_for_chunks_alone(name: str) -> None:
    model = build(name)
    text = f"{type(model).__name__} run in chunks of several tokens does not give what it gives in one plain forward"
    with pytest.raises(StepError, match=text):
        generate_with_capture(model, [[9, 10, 11, 12]], SamplingParams(), layer_ids=[1], prefill_chunk=2)
    params = SamplingParams(max_new_tokens=2, ignore_eos=True)
    [result] = generate_with_capture(model, [[9, 10, 11, 12]], params, layer_ids=[1])
    assert len(result.token_ids) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["bamba", "moshi", "openai-gpt"])
def test_a_model_that_is_wrong_token_by_token_is_refused(name: str, dtype: torch.dtype) -> None:
    model = build(name).to(dtype)
    with pytest.raises(StepError, match=f"{type(model).__name__} run token by token does not give what it gives"):
        generate_with_capture(model, [[9, 10]], SamplingParams(), layer_ids=[1], final="none")


@pytest.mark.parametrize("name", ["whisper", "minimax"])
def test_a_model_that_takes_no_such_cache_is_refused_by_name(name: str) -> None:
    model = build(name)
    with pytest.raises(StepError, match=f"{type(model).__name__} cannot be run token by token on a key-value cache"):
        generate_with_capture(model, [[9, 10]], SamplingParams(), layer_ids=[1], final="none")


def test_guesses_are_refused_before_the_first_token() -> None:
    hooks = hooks_of(lively("kimi_linear"))
    with CountedCalls(lively("kimi_linear")) as calls, pytest.raises(StepError, match="cannot go back"):
        generate_with_capture(lively("kimi_linear"), [[9] * 40], SamplingParams(), layer_ids=[1], prompt_lookup=2)
    assert (1, 40) not in calls.shapes
    assert hooks_of(lively("kimi_linear")) == hooks


def test_a_refusal_is_wrong_use_and_a_failure() -> None:
    with pytest.raises(ValueError, match="does not give") as caught:
        probed(build("bamba"), StepProbes.require_cached_steps)
    assert isinstance(caught.value, RuntimeError)
    assert caught.value.exit_code == 2


class Forgetful(torch.nn.Module):
    """Multiplies what leaves a layer, in steps behind a cache alone."""

    def __init__(self, layer: Any, factor: float) -> None:
        super().__init__()
        self.factor = factor
        layer.register_forward_hook(self._scaled, with_kwargs=True)

    def _scaled(self, _layer: Any, _args: Any, kwargs: dict[str, Any], output: Tensor) -> Tensor:
        return output * self.factor if kwargs.get("cache") is not None else output


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1.005), (torch.bfloat16, 1.4)])
def test_an_error_of_hidden_states_alone_is_found_in_both_precisions(dtype: torch.dtype, factor: float) -> None:
    from support import tiny

    model = tiny.build("llama", dtype=dtype)
    probed(model, StepProbes.require_cached_steps)
    # The final norm takes the factor out again, so the logits stay as they are.
    model.add_module("forgetful", Forgetful(model.model.layers[3], factor))
    with pytest.raises(StepError, match="aux_hidden_states differ by"):
        probed(model, StepProbes.require_cached_steps)
