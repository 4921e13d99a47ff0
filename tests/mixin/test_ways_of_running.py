"""Mixin models and taps in the ways a model is run: offloaded, wrapped, quantised, checkpointed, threaded."""

import threading
from pathlib import Path

import accelerate
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hiddentap.capture.mixin import with_capture
from hiddentap.hooks import tap
from hiddentap.models.decoder import DecoderNotFoundError, find_decoder
from support import kimi_k3, tiny
from support.quantised import quantised_llama
from support.recorder import equal, record

IDS = tiny.token_ids(2, 6)


@pytest.fixture(scope="module")
def hidden_states() -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return tiny.build("llama")(IDS, output_hidden_states=True, use_cache=False).hidden_states


def capturing(model: nn.Module, layer_ids: list[int]) -> nn.Module:
    model = with_capture(model)
    model.set_dspark_layers_to_capture(layer_ids)
    return model


@torch.no_grad()
def check_tap_and_mixin(model: nn.Module, hidden_states: tuple[torch.Tensor, ...]) -> None:
    with tap(model, [0, 2]) as t:
        for _ in range(2):  # the first forward ends in the middle and must leave nothing behind
            states = t.run(IDS).aux_hidden_states
            assert equal(states[0], hidden_states[1])
            assert equal(states[1], hidden_states[3])
    with tap(model, [3], final="post") as t:
        assert equal(t.run(IDS).post_norm, hidden_states[4])
    states = capturing(model, [0, 2])(IDS).aux_hidden_states
    assert equal(states[0], hidden_states[1])
    assert equal(states[1], hidden_states[3])


def test_weights_offloaded_to_the_cpu(hidden_states) -> None:
    model = accelerate.cpu_offload(tiny.build("llama"), execution_device="cpu")
    assert model.model.layers[0].mlp.up_proj.weight.is_meta
    check_tap_and_mixin(model, hidden_states)


def test_weights_offloaded_to_disk(hidden_states, tmp_path: Path) -> None:
    model = tiny.build("llama")
    accelerate.disk_offload(model, str(tmp_path), execution_device="cpu")
    assert model.device.type == "meta"
    check_tap_and_mixin(model, hidden_states)


def test_a_device_map_with_some_layers_on_disk(hidden_states, tmp_path: Path) -> None:
    tiny.build("llama").save_pretrained(tmp_path)
    places = {f"model.layers.{i}": "disk" if i in (1, 2) else "cpu" for i in range(4)}
    places |= dict.fromkeys(["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"], "cpu")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places, offload_folder=str(tmp_path / "off"))
    assert model.model.layers[1].mlp.up_proj.weight.is_meta
    check_tap_and_mixin(model, hidden_states)


def test_a_lora_model_is_tapped_with_its_adapters_at_work() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(3)
    model = peft.get_peft_model(tiny.build("llama"), settings).eval()
    seen = []
    layer = model.base_model.model.model.layers[2]
    with torch.no_grad():
        handle = layer.register_forward_hook(lambda module, args, output: seen.append(output.clone()))
        model(IDS, use_cache=False)
        handle.remove()
        assert find_decoder(model).layers_path == "base_model.model.model.layers"
        with tap(model, [0, 2], final="post") as t:
            captured = t.run(IDS)
        assert equal(captured.aux_hidden_states[1], seen[0])
        with model.disable_adapter(), tap(model, [2]) as t:
            assert not torch.equal(t.run(IDS).aux_hidden_states[0], seen[0])
        output = capturing(model, [0, 2])(IDS)
    assert equal(output.aux_hidden_states[1], seen[0])


@pytest.mark.parametrize(("bits", "linear"), [(8, "Linear8bitLt"), (4, "Linear4bit")])
def test_a_quantised_models_states_are_those_that_its_own_layers_give(bits: int, linear: str, tmp_path: Path) -> None:
    model = quantised_llama(tmp_path, bits)
    assert type(model.model.layers[2].mlp.up_proj).__name__ == linear
    seen = record(model, IDS, use_cache=False)[0].of("model.layers.2")[0].outputs[""]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    rounded = record(plain, IDS, use_cache=False)[0].of("model.layers.2")[0].outputs[""]
    assert 0 < (seen - rounded).norm() / rounded.norm() < 0.5
    with torch.no_grad():
        with tap(model, [2]) as t:
            state = t.run(IDS).aux_hidden_states[0]
        output = capturing(model, [2])(IDS, use_cache=False)
    assert equal(state, seen)
    assert equal(output.aux_hidden_states[0], seen)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_training_captures_each_layer_once_and_gradients_flow(reentrant: bool, hidden_states) -> None:
    model = capturing(tiny.build("llama").train(), [0, 2])
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    seen = []
    model.on_auxiliary_output = seen.append
    embedded = model.get_input_embeddings()(IDS).detach().requires_grad_(True)
    output = model(inputs_embeds=embedded, use_cache=False)
    (output.aux_hidden_states[1].pow(2).mean() + output.logits.mean()).backward()
    assert len(seen) == 1
    assert equal(output.aux_hidden_states[0], hidden_states[1])
    assert equal(output.aux_hidden_states[1], hidden_states[3])
    assert model.model.layers[2].mlp.up_proj.weight.grad.abs().sum() > 0


def test_a_trainer_differentiates_through_captured_states_to_the_layers_before_them_alone() -> None:
    model = capturing(tiny.build("llama"), [1])
    model(IDS).aux_hidden_states[0].sum().backward()
    grads = [layer.mlp.up_proj.weight.grad for layer in model.model.layers]
    assert [grad is not None for grad in grads] == [True, True, False, False]


def test_states_taken_in_inference_mode_are_usable_outside_once_cloned(hidden_states) -> None:
    with torch.inference_mode(), tap(tiny.build("llama"), [2]) as t:
        state = t.run(IDS).aux_hidden_states[0]
    assert state.is_inference()
    weight = torch.ones(32, requires_grad=True)
    (state.clone() * weight).sum().backward()
    assert equal(state.clone(), hidden_states[3])


@pytest.mark.parametrize("attention", ["eager", "sdpa", pytest.param("flex_attention", marks=pytest.mark.slow)])
def test_each_attention_implementation_gives_its_own_bits(attention: str) -> None:
    def build() -> nn.Module:
        model = tiny.build("llama")
        model.set_attn_implementation(attention)
        return model

    with torch.no_grad():
        try:
            hs = build()(IDS, output_hidden_states=True, use_cache=False).hidden_states
        except (RuntimeError, ImportError, NotImplementedError) as unable:
            pytest.skip(f"{attention} does not run on this machine: {unable}")
        check_tap_and_mixin(build(), hs)


def test_two_threads_calling_one_mixin_model_get_the_states_of_their_own_batches() -> None:
    model = capturing(tiny.build("llama"), [0, 2])
    batches = [tiny.token_ids(1, 6, seed=seed) for seed in range(8)]
    with torch.no_grad():
        expected = [model(ids).aux_hidden_states[1] for ids in batches]
    got: dict[int, torch.Tensor] = {}

    def work(indices: range) -> None:
        with torch.no_grad():
            for i in indices:
                got[i] = model(batches[i]).aux_hidden_states[1]

    threads = [threading.Thread(target=work, args=(range(k, 8, 2),)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(got[i], expected[i]) for i in range(8))


def test_data_parallel_is_refused_by_taps_and_by_its_replicas() -> None:
    with (
        pytest.raises(DecoderNotFoundError, match=r"nn\.DataParallel is not supported"),
        tap(nn.DataParallel(tiny.build("llama")), [0]),
    ):
        pass
    model = capturing(tiny.build("llama"), [0])
    replica = model._replicate_for_data_parallel()
    with pytest.raises(DecoderNotFoundError, match=r"nn\.DataParallel is not supported: its replicas share"):
        replica(IDS)


def test_an_adapter_named_on_a_mixin_model_reads_its_states() -> None:
    model = with_capture(kimi_k3.build())
    model.set_dspark_layers_to_capture([1, 5])
    with pytest.raises(RuntimeError, match=r"attention_residuals\.prefix"):
        model(IDS)
    model.capture_adapter = "attention_residuals.mixture"
    model.set_dspark_layers_to_capture([1, 5])
    with torch.no_grad():
        states = model(IDS).aux_hidden_states
        with tap(kimi_k3.build(), [1, 5], adapter="attention_residuals.mixture") as t:
            expected = t.run(IDS).aux_hidden_states
    assert all(equal(a, b) for a, b in zip(states, expected, strict=True))
