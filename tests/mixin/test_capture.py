"""Captured calls of a mixin model."""

import copy
import io
import json
import pickle
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from transformers import LlamaForCausalLM, StaticCache

from hiddentap.capture.mixin import HiddenStateCaptureMixin, with_capture, without_capture
from hiddentap.capture.outputs import DeviceHiddenStates
from hiddentap.hooks import PositionsError, TapError
from hiddentap.models.call import cache_argument
from hiddentap.models.errors import UsageError
from support import tiny


def capturing(layer_ids: list[int], family: str = "llama") -> nn.Module:
    model = with_capture(tiny.build(family))
    model.set_dspark_layers_to_capture(layer_ids)
    return model


def test_states_and_rows_of_a_call_are_those_boundaries_in_order() -> None:
    ids = tiny.token_ids(2, 7)
    hs = tiny.build("llama")(ids, output_hidden_states=True).hidden_states
    output = capturing([0, 2, 3])(ids)
    assert isinstance(output.aux_hidden_states, tuple)
    assert torch.equal(output.aux_hidden_states[0], hs[1])
    assert torch.equal(output.aux_hidden_states[1], hs[3])
    assert not torch.equal(output.aux_hidden_states[2], hs[4])
    rows = output.auxiliary_device_output
    assert isinstance(rows, DeviceHiddenStates)
    assert rows.aux_hidden_states.shape == (14, 3, 32)
    assert torch.equal(rows.aux_hidden_states[7:, 1], hs[3][1])
    assert (rows.layout.row_counts, rows.layout.first_positions) == ((7, 7), (0, 0))


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_logits_are_equal_bit_for_bit_with_and_without_capture(family: str) -> None:
    ids = tiny.token_ids(2, 7)
    plain = tiny.build(family)(ids).logits
    model = capturing([0, 2], family)
    assert torch.equal(model(ids).logits, plain)
    assert torch.equal(model(ids).logits, plain)
    assert torch.equal(without_capture(model)(ids).logits, plain)


def test_the_states_are_attributes_and_no_keys_of_the_output() -> None:
    output = capturing([0])(tiny.token_ids(1, 3))
    assert "aux_hidden_states" not in output
    assert set(output.keys()) == set(tiny.build("llama")(tiny.token_ids(1, 3)).keys())


def test_real_rows_come_from_lengths_or_from_a_mask() -> None:
    model = capturing([1])
    batch = tiny.token_ids(3, 5)
    by_lengths = model(batch, lengths=[3, 5, 2]).auxiliary_device_output
    assert by_lengths.aux_hidden_states.shape == (10, 1, 32)
    assert by_lengths.layout.row_counts == (3, 5, 2)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    output = model(batch, attention_mask=mask)
    rows = output.auxiliary_device_output.aux_hidden_states
    assert torch.equal(rows[3:8, 0], output.aux_hidden_states[0][1])
    torch.testing.assert_close(rows, by_lengths_rows(model, batch), atol=1e-5, rtol=0)


def by_lengths_rows(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    singles = [model(batch[b : b + 1, :n]).aux_hidden_states[0][0] for b, n in enumerate((3, 5, 2))]
    return torch.cat(singles)[:, None]


def test_holes_and_lone_pads_are_refused() -> None:
    model = capturing([1])
    with pytest.raises(PositionsError, match="hole"):
        model(tiny.token_ids(1, 3), attention_mask=torch.tensor([[1, 0, 1]]))
    with pytest.raises(PositionsError, match="pad id 0"):
        model(torch.tensor([[9, 0]]))


def through_a_file(output: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(output, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o)), through_a_file])
def test_a_captured_output_is_copied_and_pickled_as_the_plain_one(copied: Any) -> None:
    model = capturing([0, 2])
    with torch.no_grad():
        output = model(tiny.token_ids(2, 5))
        twin, plain = copied(output), copied(tiny.build("llama")(tiny.token_ids(2, 5)))
    assert type(twin) is type(plain)
    assert torch.equal(twin.logits, plain.logits)
    assert all(torch.equal(a, b) for a, b in zip(twin.aux_hidden_states, output.aux_hidden_states, strict=True))
    expected = output.auxiliary_device_output.aux_hidden_states
    assert torch.equal(twin.auxiliary_device_output.aux_hidden_states, expected)
    assert twin.auxiliary_device_output.layout == output.auxiliary_device_output.layout
    rows = copied(output.auxiliary_device_output)
    host = rows.copy_to_host(lambda tensor: tensor)
    assert torch.equal(copied(host).columns["aux_hidden_states"], expected)
    with pytest.raises(RuntimeError, match="copied to the host already"):
        _ = copied(rows).columns


def test_a_static_cache_is_padded_by_the_columns_of_the_call() -> None:
    model, ids = capturing([0, 2]), tiny.token_ids(1, 7)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0]])
    cache = {cache_argument(model): StaticCache(config=model.config, max_cache_len=8)}
    with torch.no_grad():
        first = model(ids[:, :6], attention_mask=mask, **cache).auxiliary_device_output
        mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0]])
        second = model(ids[:, 6:], attention_mask=mask, **cache).auxiliary_device_output
        alone = capturing([0, 2])(ids[:, 2:]).auxiliary_device_output.aux_hidden_states
    assert (first.layout.row_counts, first.layout.first_positions) == ((4,), (0,))
    assert (second.layout.row_counts, second.layout.first_positions) == ((1,), (4,))
    rows = torch.cat([first.aux_hidden_states, second.aux_hidden_states])
    torch.testing.assert_close(rows, alone, atol=1e-4, rtol=1e-4)


def test_generate_over_prompts_padded_on_the_right_points_to_the_left() -> None:
    model, ids = capturing([1]), tiny.token_ids(2, 4)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    with pytest.raises(PositionsError, match="use padding_side='left'"):
        model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)


def test_a_tuple_output_is_refused() -> None:
    model = capturing([1])
    with pytest.raises(ValueError, match="return_dict=False cannot be combined with hidden-state capture"):
        model(tiny.token_ids(1, 3), return_dict=False)
    model.config.return_dict = False
    with pytest.raises(ValueError, match="return_dict=False"):
        model(tiny.token_ids(1, 3))


def test_each_step_of_generate_is_seen_once() -> None:
    model = capturing([0, 3])
    seen: list[tuple[int, ...]] = []
    firsts: list[tuple[int, ...]] = []

    def on_output(output: DeviceHiddenStates) -> None:
        seen.append(output.layout.row_counts)
        firsts.append(output.layout.first_positions)

    model.on_auxiliary_output = on_output
    prompt = tiny.token_ids(2, 5)
    tokens = model.generate(
        prompt, max_new_tokens=4, do_sample=False, eos_token_id=None, attention_mask=torch.ones_like(prompt)
    )
    assert tokens.shape == (2, 9)
    assert seen == [(5, 5), (1, 1), (1, 1), (1, 1)]
    assert firsts == [(0, 0), (5, 5), (6, 6), (7, 7)]


def test_left_padded_generation_counts_positions_without_the_padding() -> None:
    model = capturing([0])
    firsts = []
    model.on_auxiliary_output = lambda output: firsts.append((output.layout.row_counts, output.layout.first_positions))
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    model.generate(tiny.token_ids(2, 5), attention_mask=mask, max_new_tokens=2, do_sample=False, eos_token_id=None)
    assert firsts == [((3, 5), (0, 0)), ((1, 1), (3, 5))]


def test_generated_tokens_are_the_same_with_capture() -> None:
    prompt = tiny.token_ids(2, 5)
    settings = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    assert torch.equal(capturing([0, 2]).generate(prompt, **settings), tiny.build("llama").generate(prompt, **settings))


def test_without_capture_restores_class_attributes_hooks_and_state_keys() -> None:
    model = tiny.build("llama")
    cls, attributes, keys = type(model), set(vars(model)), list(model.state_dict())
    assert with_capture(model) is model
    assert with_capture(model) is model
    assert type(model).__name__ == "LlamaForCausalLM"
    assert isinstance(model, LlamaForCausalLM)
    model.set_dspark_layers_to_capture([0, 2])
    model.on_auxiliary_output = lambda output: None
    model(tiny.token_ids(1, 3))
    assert without_capture(model) is model
    assert (type(model), set(vars(model)), list(model.state_dict())) == (cls, attributes, keys)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert without_capture(model) is model


def test_models_of_one_class_share_one_capturing_class() -> None:
    assert type(with_capture(tiny.build("llama"))) is type(with_capture(tiny.build("llama")))


@pytest.mark.parametrize("copier", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_captures_on_its_own(copier: str) -> None:
    ids = tiny.token_ids(1, 4)
    model = capturing([0, 2])
    expected = model(ids)
    copies = {
        "deepcopy": lambda: copy.deepcopy(model),
        "pickle": lambda: pickle.loads(pickle.dumps(model)),
        "torch.save": lambda: through_torch_save(model),
    }
    twin = copies[copier]()
    kept = model.last_auxiliary_output
    got = twin(ids)
    assert type(twin) is type(model)
    assert twin.layers_to_capture == [0, 2]
    assert torch.equal(got.logits, expected.logits)
    assert all(torch.equal(a, b) for a, b in zip(got.aux_hidden_states, expected.aux_hidden_states, strict=True))
    assert model.last_auxiliary_output is kept
    without_capture(twin)
    assert all(not m._forward_hooks for m in twin.modules())
    assert model(ids).aux_hidden_states


def through_torch_save(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def test_a_model_with_gradients_in_its_last_output_can_be_copied() -> None:
    model = capturing([0])
    model(tiny.token_ids(1, 3))
    assert copy.deepcopy(model).last_auxiliary_output is None


def test_save_pretrained_writes_the_original_architecture(tmp_path) -> None:
    model = capturing([0, 2])
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    ids = tiny.token_ids(1, 4)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_a_model_with_accelerate_hooks_is_captured_too() -> None:
    ids = tiny.token_ids(1, 4)
    hs = tiny.build("llama")(ids, output_hidden_states=True).hidden_states
    model = tiny.build("llama")
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True))
    assert "forward" in vars(model)
    with_capture(model)
    model.set_dspark_layers_to_capture([1])
    assert torch.equal(model(ids).aux_hidden_states[0], hs[2])


class CapturingLlama(HiddenStateCaptureMixin, LlamaForCausalLM):
    """The way of subclassing."""


def test_a_subclass_captures_and_saves_under_its_own_name(tmp_path) -> None:
    model = CapturingLlama(tiny.llama_config()).eval()
    model.set_dspark_layers_to_capture([1, 3])
    ids = tiny.token_ids(1, 4)
    with torch.no_grad():
        states = model(ids).aux_hidden_states
        model.clear_layers_to_capture()
        assert not hasattr(model(ids), "aux_hidden_states")
        hs = model(ids, output_hidden_states=True).hidden_states
    assert torch.equal(states[0], hs[2])
    assert torch.equal(model.model.norm(states[1]), hs[4])


def test_gradients_flow_through_captured_states_but_not_through_the_rows() -> None:
    model = capturing([1])
    output = model(tiny.token_ids(1, 4))
    assert output.aux_hidden_states[0].requires_grad
    assert not output.auxiliary_device_output.aux_hidden_states.requires_grad


def test_captured_calls_work_in_inference_mode() -> None:
    model, ids = capturing([1]), tiny.token_ids(1, 4)
    with torch.inference_mode():
        states = model(ids).aux_hidden_states[0]
    assert torch.equal(states, model(ids).aux_hidden_states[0])


def test_the_first_captured_call_checks_that_the_taps_are_true() -> None:
    model = capturing([1])
    model.model.layers[2].register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]), prepend=True)
    with pytest.raises(TapError, match="boundary 2"):
        model(tiny.token_ids(1, 4))


def test_a_call_without_ids_or_embeddings_is_refused() -> None:
    with pytest.raises(UsageError, match="needs input_ids"):
        capturing([1])()


def test_embeddings_serve_instead_of_ids() -> None:
    model, ids = capturing([1]), tiny.token_ids(1, 4)
    embedded = model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=embedded).aux_hidden_states[0], model(ids).aux_hidden_states[0])
