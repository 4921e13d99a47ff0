"""Adapters: each against what an independent record shows, and named wherever structure leaves a choice."""

import pytest
import torch
from torch import nn

from hiddentap.hooks import TapError, probe, tap
from hiddentap.models.adapter_names import ADAPTERS, AdapterError
from hiddentap.models.decoder import find_decoder
from support import architectures, kimi_k3, neutral_names, remote_code, serving_style, tiny
from support.recorder import equal, layer_calls, record

IDS = architectures.token_ids(2, 7)


@torch.no_grad()
def captured(model: nn.Module, boundaries: range, adapter: str | None, final: str = "none"):
    with tap(model, boundaries, "boundary", final=final, adapter=adapter) as t:
        return t.run(IDS)


def test_the_prefix_of_attention_residuals_is_what_each_layer_returns_first() -> None:
    model = kimi_k3.build()
    calls = layer_calls(record(model, IDS)[0], "model.layers")
    states = captured(model, range(7), "attention_residuals.prefix").aux_hidden_states
    assert equal(states[0], model.model.embed_tokens(IDS))
    assert all(equal(states[i + 1], calls[i].outputs["[0]"]) for i in range(6))


def test_the_mixture_of_attention_residuals_is_made_by_the_next_layer_and_after_the_last_by_the_model() -> None:
    model = kimi_k3.build()
    calls = layer_calls(record(model, IDS)[0], "model.layers")
    c = captured(model, range(7), "attention_residuals.mixture", final="pre")
    consumers = [(layer.self_attention_res_proj, layer.self_attention_res_norm) for layer in model.model.layers]
    consumers.append((model.model.output_attn_res_proj, model.model.output_attn_res_norm))
    assert equal(c.aux_hidden_states[0], model.model.embed_tokens(IDS))
    for b in range(1, 7):
        prefix, blocks = calls[b - 1].outputs["[0]"], calls[b - 1].outputs["[1]"]
        assert equal(c.aux_hidden_states[b], kimi_k3.mixture(prefix, blocks, *consumers[b])), f"boundary {b}"
        assert not torch.equal(c.aux_hidden_states[b], prefix)
    assert equal(c.pre_norm, c.aux_hidden_states[6])


def test_attention_residuals_are_never_read_without_a_name() -> None:
    model = kimi_k3.build()
    for b in range(1, 7):
        with pytest.raises(
            TapError, match=rf"boundary {b} .*attention_residuals\.prefix.*attention_residuals\.mixture"
        ):
            captured(model, range(b, b + 1), None)


def test_a_pair_of_hidden_and_residual_is_added_even_where_the_norm_adds_it_in_place() -> None:
    model = serving_style.build()
    calls = layer_calls(record(model, IDS)[0], "layers")
    c = captured(model, range(5), "hidden_residual.sum", final="both")
    assert equal(c.aux_hidden_states[0], model.embed_tokens(IDS))
    for i, call in enumerate(calls):
        assert equal(c.aux_hidden_states[i + 1], call.outputs["[0]"] + call.outputs["[1]"]), f"layer {i}"
    assert equal(c.pre_norm, c.aux_hidden_states[4])
    with torch.no_grad():
        assert equal(c.post_norm, model(IDS))


def test_a_pair_is_neither_added_nor_chosen_from_without_a_name() -> None:
    with pytest.raises(
        TapError, match=r"item 1 looks just like the hidden state.*--adapter hidden_residual\.sum.*tuple\.first"
    ):
        captured(serving_style.build(), range(2, 3), None)


def test_the_first_of_a_pair_can_be_asked_for_but_not_what_an_adding_norm_takes_in() -> None:
    model = serving_style.build()
    calls = layer_calls(record(model, IDS)[0], "layers")
    state = captured(model, range(2, 3), "tuple.first").aux_hidden_states[0]
    assert equal(state, calls[1].outputs["[0]"])
    with pytest.raises(TapError, match="no final norm was found"):
        captured(model, range(2, 3), "tuple.first", final="pre")


def test_deepstack_features_between_layers_belong_to_the_state() -> None:
    model = architectures.build("qwen3_vl").model.language_model
    images = torch.zeros(2, 7, dtype=torch.bool)
    images[:, 2:4] = True
    features = [torch.randn(4, 32, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    given = {"visual_pos_masks": images, "deepstack_visual_embeds": features}
    calls = layer_calls(record(model, IDS, use_cache=False, **given)[0], "layers")
    with torch.no_grad(), tap(model, range(5), "boundary") as t:
        states = t.run(IDS, **given).aux_hidden_states
    assert find_decoder(model).adapter_name == "next_input"
    assert all(equal(states[i], calls[i].inputs["[0]"]) for i in range(4))
    assert equal(states[4], calls[3].outputs[""])
    assert not torch.equal(states[1], calls[0].outputs[""])
    assert torch.equal(states[1][:, 4:], calls[0].outputs[""][:, 4:])


def test_streams_side_by_side_are_kept_in_their_order() -> None:
    model = architectures.build("deepseek_v4")
    calls = layer_calls(record(model, IDS, use_cache=False)[0], "model.layers")
    states = captured(model, range(1, 5), "hyper_connections.streams").aux_hidden_states
    for i, state in enumerate(states):
        assert state.shape == (2, 7, 128)
        for stream in range(4):
            assert equal(
                state[..., 32 * stream : 32 * (stream + 1)].contiguous(),
                calls[i].outputs[""][:, :, stream].contiguous(),
            )


def test_the_width_of_the_norm_is_told_beside_that_of_streams_kept_apart() -> None:
    decoder = find_decoder(architectures.build("deepseek_v4"), adapter="hyper_connections.streams")
    truth = probe(decoder)
    assert (truth.hidden_size, truth.norm.hidden_size) == (128, 32)


def test_norm_states_of_hyper_connections_are_those_of_the_collapsed_stream() -> None:
    model = architectures.build("deepseek_v4")
    recorder, _ = record(model, IDS, use_cache=False)
    (norm,) = recorder.of("model.norm")
    for adapter in ("hyper_connections.mean", "hyper_connections.streams"):
        c = captured(model, range(2, 3), adapter, final="both")
        assert equal(c.pre_norm, norm.inputs["[0]"])
        assert equal(c.post_norm, norm.outputs[""])


def test_the_old_tuple_form_of_remote_code_needs_no_adapter() -> None:
    model = remote_code.build()
    calls = layer_calls(record(model, IDS)[0], "model.layers")
    assert calls[0].output_form.startswith("tuple(tensor, tensor 4-D")
    states = captured(model, range(5), None, final="both").aux_hidden_states
    assert all(equal(states[i + 1], calls[i].outputs["[0]"]) for i in range(4))


@pytest.mark.parametrize(
    ("adapter", "text"),
    [
        ("hyper_connections.mean", r"expected several residual streams of width 32, found \(2, 5, 32\)"),
        ("altup.streams", "expected several residual streams of width 32"),
        ("hidden_residual.sum", r"expected a pair \(hidden, residual\) of one shape, found \(2, 5, 32\)"),
    ],
)
def test_an_adapter_that_the_states_do_not_fit_is_refused(adapter: str, text: str) -> None:
    with pytest.raises(TapError, match=rf"boundary 2 .*{adapter}: {text}"):
        captured(tiny.build("llama"), range(2, 3), adapter)


@pytest.mark.parametrize("adapter", ["attention_residuals.prefix", "attention_residuals.mixture"])
def test_an_adapter_that_the_structure_does_not_fit_is_refused(adapter: str) -> None:
    with pytest.raises(AdapterError, match=rf"adapter {adapter} reads .*LlamaDecoderLayer\) have nothing of that kind"):
        find_decoder(tiny.build("llama"), adapter=adapter)


def test_an_unknown_adapter_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(
        AdapterError, match=r"unknown adapter 'mean'; expected one of hyper_connections\.mean, .*next_input"
    ):
        find_decoder(tiny.build("llama"), adapter="mean")


def test_the_next_input_of_an_ordinary_model_is_the_output_of_the_layer() -> None:
    model = tiny.build("llama")
    plain, next_input = (captured(model, range(5), adapter).aux_hidden_states for adapter in (None, "next_input"))
    assert all(equal(a, b) for a, b in zip(plain, next_input, strict=True))


def test_every_adapter_says_what_it_reads() -> None:
    assert all(adapter.name == name and len(adapter.about) > 10 for name, adapter in ADAPTERS.items())


def test_blocks_of_neutral_names_are_found_by_what_feeds_what() -> None:
    model = neutral_names.build()
    decoder = find_decoder(model)
    assert (decoder.layers_path, decoder.n, decoder.found_by) == ("parts", 5, "probing")
    calls = layer_calls(record(model, IDS)[0], "parts")
    with torch.no_grad(), tap(model, [0, 1, 2, 3, 5], "boundary", final="pre") as t:
        c = t.run(IDS)
    assert equal(c.aux_hidden_states[0], model.table(IDS))
    for slot, layer in ((1, 0), (2, 1), (3, 2), (4, 4)):
        assert equal(c.aux_hidden_states[slot], calls[layer].outputs["[0]"])
    assert equal(c.pre_norm, c.aux_hidden_states[4])


def test_a_block_called_twice_is_refused_by_name() -> None:
    with (
        pytest.raises(TapError, match=r"parts\.3 ran 2 times in one forward of Neutral"),
        tap(neutral_names.build(), [3]),
    ):
        pass
