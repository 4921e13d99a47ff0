"""Hooks that collect one forward of their own thread, see what the next module sees, and miss nothing in silence."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hiddentap.capture.mixin import with_capture
from hiddentap.hooks import ClonedStates, Collector, TapError, Taps, tap
from hiddentap.models.decoder import find_decoder
from support import tiny

IDS = tiny.token_ids(1, 6)


def captured(model: nn.Module, layer_ids: list[int]) -> Any:
    model = with_capture(model)
    model.set_dspark_layers_to_capture(layer_ids)
    return model


def doubled(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return output * 2


def test_a_hook_that_is_registered_later_and_changes_a_layer_is_seen() -> None:
    model: Any = captured(tiny.build("llama"), [1])
    with torch.no_grad():
        model(IDS)
        model.model.layers[1].register_forward_hook(doubled)
        seen: list[Tensor] = []
        model.model.layers[2].register_forward_pre_hook(lambda _module, args: seen.append(args[0].clone()))
        states = model(IDS).aux_hidden_states[0]
    assert torch.equal(states, seen[0])


def test_a_tap_sees_such_a_hook_too_and_leaves_it_where_it_is() -> None:
    model: Any = tiny.build("llama")
    with torch.no_grad(), tap(model, [1]) as t:
        handle = model.model.layers[1].register_forward_hook(doubled)
        after = t.run(IDS).aux_hidden_states[0]
        handle.remove()
        assert torch.equal(after, 2 * t.run(IDS).aux_hidden_states[0])


def test_a_later_pre_hook_that_changes_what_enters_the_first_layer_is_seen() -> None:
    model: Any = tiny.build("llama")
    with torch.no_grad(), tap(model, [0], "boundary") as t:
        before = t.run(IDS).aux_hidden_states[0]
        model.model.layers[0].register_forward_pre_hook(lambda _module, args: (args[0] * 2, *args[1:]))
        assert torch.equal(t.run(IDS).aux_hidden_states[0], 2 * before)


def test_a_compiled_model_made_before_capture_is_told_and_its_captured_call_is_not() -> None:
    torch._dynamo.reset()
    model: Any = tiny.build("llama")
    compiled = torch.compile(model, backend="eager")
    captured(model, [1])
    with torch.no_grad():
        with pytest.raises(
            TapError, match=r"model\.layers\.1 of LlamaForCausalLM ran while capture is on, but not in a call"
        ):
            compiled(IDS)
        assert model(IDS).aux_hidden_states[0].shape == (1, 6, 32)
        model.clear_layers_to_capture()
        assert not hasattr(compiled(IDS), "aux_hidden_states")


def test_a_base_model_that_is_called_alone_is_told() -> None:
    model: Any = captured(tiny.build("llama"), [1])
    with torch.no_grad(), pytest.raises(TapError, match="its states would be lost"):
        model.model(IDS)


def test_generate_of_a_captured_peft_model_is_refused_and_of_its_base_model_captured() -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(tiny.build("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    settings = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "max_new_tokens": 3, "do_sample": False}
    wrapped: Any = captured(adapted, [1])
    assert wrapped(IDS).aux_hidden_states[0].shape == (1, 6, 32)
    with pytest.raises(TapError, match=r"of a PeftModel get_base_model\(\) for generate\(\)"):
        wrapped.generate(**settings)
    wrapped.clear_layers_to_capture()
    inner: Any = captured(adapted.get_base_model(), [1])
    steps: list[Any] = []
    inner.on_auxiliary_output = steps.append
    adapted.generate(**settings)
    assert [step.aux_hidden_states.shape[0] for step in steps] == [6, 1, 1]


def test_generate_of_a_captured_compiled_model_is_refused_and_loses_no_step() -> None:
    wrapped: Any = captured(torch.compile(tiny.build("llama"), backend="eager"), [1])
    steps: list[Any] = []
    wrapped.on_auxiliary_output = steps.append
    with pytest.raises(TapError, match=r"ran while capture is on, but not in a call of that model itself"):
        wrapped.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=3, do_sample=False)
    assert steps == []


def test_backward_through_checkpointed_layers_is_no_forward_of_its_own() -> None:
    model: Any = captured(tiny.build("llama"), [1]).train()
    model.gradient_checkpointing_enable()
    output = model(IDS, use_cache=False)
    output.logits.sum().backward()
    assert model.model.layers[1].mlp.up_proj.weight.grad is not None


def test_forwards_pass_unheard_where_they_are_ignored_and_where_nothing_must_be_collected() -> None:
    model = tiny.build("llama")
    strict = Collector(find_decoder(model), Taps((2,)), every_forward=True)
    strict.attach()
    with torch.no_grad():
        with pytest.raises(TapError, match="ran while capture is on"):
            model(IDS)
        with strict.ignoring():
            model(IDS)
        slots = ClonedStates(1)
        with strict.armed(slots, 1, 6):
            model(IDS)
        assert slots.states[0].shape == (1, 6, 32)  # type: ignore[union-attr]
        strict.detach()
        model(IDS)
        with tap(model, [1]):
            model(IDS)
