"""Rows in company are those of the same sequences alone, or the call is refused and says which way of running stays open."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, BertConfig, BertLMHeadModel, StaticCache

from hiddentap.capture.mixin import with_capture
from hiddentap.hooks import TapError, tap
from support import tiny
from support.architectures import build

MASK_LEFT = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
MASK_RIGHT = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
IDS = tiny.token_ids(2, 6)
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 64,
}  # fmt: skip
SCALED = {
    "rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 1024,
}  # fmt: skip


def bidirectional() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    model = BertLMHeadModel(BertConfig(vocab_size=96, is_decoder=False, **sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


def longrope(family: str) -> Any:
    own = {} if family == "llama" else {"original_max_position_embeddings": 64}
    scales = {"short_mscale": 1.0, "long_mscale": 1.2} if family == "phimoe" else {}
    return build(family, rope_parameters=LONGROPE | scales, max_position_embeddings=256, **own)


@torch.no_grad()
def rows_alone(model: Any, sequences: list[Tensor], path: str, layer: int) -> Tensor:
    """(T, H) of a layer, each sequence in a forward of its own, noted by a hook of the test's own."""
    seen: list[Tensor] = []
    handle = model.get_submodule(path)[layer].register_forward_hook(
        lambda _module, _args, out: seen.append((out[0] if isinstance(out, tuple) else out)[0].clone())
    )
    for ids in sequences:
        model(ids[None], use_cache=False)
    handle.remove()
    return torch.cat(seen)


def test_lengths_are_refused_where_padding_is_seen_and_a_mask_is_taken() -> None:
    model = bidirectional()
    with torch.no_grad(), tap(model, [1]) as t:
        with pytest.raises(TapError, match=r"right padding without a mask .* not causal as it is configured\. Run one"):
            t.run(IDS, lengths=[3, 6])
        rows = t.run(IDS, attention_mask=MASK_RIGHT).rows()[:, 0]
    expected = rows_alone(model, [IDS[0, :3], IDS[1]], "bert.encoder.layer", 1)
    torch.testing.assert_close(rows, expected, atol=1e-5, rtol=1e-5)


def test_the_mixin_refuses_lengths_of_such_a_model_and_takes_unpadded_calls() -> None:
    model: Any = with_capture(bidirectional())
    model.set_dspark_layers_to_capture([1])
    with torch.no_grad():
        with pytest.raises(TapError, match="right padding without a mask"):
            model(IDS, lengths=[3, 6])
        assert model(IDS).auxiliary_device_output.aux_hidden_states.shape == (12, 1, 32)


@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt_neo", "bloom", "llama", "mpt", "mamba2"])
def test_rows_of_a_left_padded_mask_without_position_ids_are_those_of_the_sequences_alone(family: str) -> None:
    model = build(family)
    path = {"gpt2": "transformer.h", "gpt_neo": "transformer.h", "bloom": "transformer.h", "opt": "model.decoder.layers",
            "mpt": "transformer.blocks", "mamba2": "backbone.layers"}.get(family, "model.layers")  # fmt: skip
    expected = rows_alone(model, [IDS[0, 3:], IDS[1]], path, 2)
    with torch.no_grad(), tap(model, [2]) as t:
        rows = t.run(IDS, attention_mask=MASK_LEFT).rows()[:, 0]
    torch.testing.assert_close(rows, expected, atol=1e-4, rtol=1e-4)
    captured: Any = with_capture(model)
    captured.set_dspark_layers_to_capture([2])
    with torch.no_grad():
        rows = captured(IDS, attention_mask=MASK_LEFT).auxiliary_device_output.aux_hidden_states[:, 0]
    torch.testing.assert_close(rows, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt_neo", "xglm", "mixtral"])
def test_so_are_they_in_half_precision(family: str) -> None:
    model = build(family).bfloat16()
    path = {"gpt2": "transformer.h", "gpt_neo": "transformer.h", "opt": "model.decoder.layers"}.get(
        family, "model.layers"
    )
    expected = rows_alone(model, [IDS[0, 3:]], path, 2).float()
    with torch.no_grad(), tap(model, [2]) as t:
        rows = t.run(IDS, attention_mask=MASK_LEFT).rows()[:3, 0].float()
    assert ((rows - expected).norm(dim=1) < 0.03 * expected.norm(dim=1)).all()


@pytest.mark.parametrize("family", ["bamba", "electra"])
def test_half_precision_hides_no_cache_that_changes_the_rows_behind_it(family: str) -> None:
    fields = {"is_decoder": False} if family == "electra" else {}
    text = "with one token behind a cache its rows differ"
    with torch.no_grad(), tap(build(family, **fields).bfloat16(), [2]) as t, pytest.raises(TapError, match=text):
        t._company.require("one token behind a cache")


@pytest.mark.parametrize("family", ["mamba", "mamba2", "falcon_mamba"])
def test_a_residual_stream_in_float32_of_half_precision_weights_is_judged_as_half_precision(family: str) -> None:
    model = build(family).bfloat16()
    with torch.no_grad(), tap(model, [2], stop_early=False) as t:
        assert t.run(IDS).aux_hidden_states[0].dtype == torch.float32
        t._company.require("one token behind a cache")


@pytest.mark.parametrize("family", ["recurrent_gemma"])
def test_a_model_that_ignores_its_mask_is_refused_for_left_padding_alone(family: str) -> None:
    with torch.no_grad(), tap(build(family), [1]) as t:
        with pytest.raises(TapError, match="with left padding"):
            t.run(IDS, attention_mask=MASK_LEFT)
        assert t.run(IDS, lengths=[3, 6]).rows().shape[0] == 9


@pytest.mark.parametrize("family", ["phi3", "phimoe", "llama"])
def test_sequences_on_both_sides_of_a_rotary_limit_do_not_share_a_forward(family: str) -> None:
    model, ids = longrope(family), tiny.token_ids(2, 66)
    sequences = [ids[0, :65], ids[1]]
    expected = rows_alone(model, sequences, "model.layers", 1)
    with torch.no_grad(), tap(model, [1]) as t:
        with pytest.raises(TapError, match=r"once it holds more than 64 positions; found sequences of 60 and 66"):
            t.run(ids, lengths=[60, 66])
        with pytest.raises(TapError, match="padding included"):
            t.run(ids, lengths=[60, 64])
        torch.testing.assert_close(t.run(ids, lengths=[65, 66]).rows()[:, 0], expected, atol=1e-4, rtol=1e-4)
    captured: Any = with_capture(model)
    captured.set_dspark_layers_to_capture([1])
    with torch.no_grad(), pytest.raises(TapError, match="once it holds more than 64 positions"):
        captured(ids, lengths=[60, 66])


class Holder(nn.Module):
    """A module of somebody's own around a model: it has no config."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def test_limits_are_those_of_the_model_inside_a_module_without_a_config() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    steady, sparse = Holder(longrope("llama")), Holder(build("deepseek_v32", index_topk=8))
    changing = Holder(build("qwen3_moe", rope_parameters=rope, max_position_embeddings=16))
    with torch.no_grad(), tap(steady, [1]) as t, pytest.raises(TapError, match="once it holds more than 64 positions"):
        t.run(tiny.token_ids(2, 66), lengths=[60, 66])
    with torch.no_grad(), tap(sparse, [1]) as t, pytest.raises(TapError, match="attends to 8 selected positions"):
        t.run(tiny.token_ids(2, 12), lengths=[5, 12])
    captured: Any = with_capture(changing)
    captured.set_dspark_layers_to_capture([1])
    with torch.no_grad(), pytest.raises(TapError, match=r"past 16 positions .* found 17"):
        captured(tiny.token_ids(1, 17))


def test_a_cache_does_not_grow_across_a_rotary_limit() -> None:
    model, ids = longrope("llama"), tiny.token_ids(1, 66)
    with torch.no_grad(), tap(model, [1]) as t:
        cache = t.run(ids[:, :63], use_cache=True).output.cache
        cache = t.run(ids[:, 63:64], cache=cache).output.cache
        with pytest.raises(TapError, match=r"the cache holds 64 positions with the former ones.* would reach 65"):
            t.run(ids[:, 64:65], cache=cache)


def test_a_dynamic_rotary_embedding_is_refused_past_the_length_where_it_changes_with_every_token() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = build("llama", rope_parameters=rope, max_position_embeddings=16)
    with torch.no_grad(), tap(model, [1]) as t:
        assert t.run(tiny.token_ids(2, 16), lengths=[16, 7]).rows().shape[0] == 23
        with pytest.raises(TapError, match=r"past 16 positions .* found 17"):
            t.run(tiny.token_ids(1, 17))


def test_a_static_cache_that_changes_rows_is_refused_and_a_dynamic_one_is_not() -> None:
    model: Any = build("llama")
    scaled = model.model.layers[0].register_forward_hook(
        lambda _m, _a, kw, out: out * 1.01 if type(kw.get("cache")) is StaticCache else out, with_kwargs=True
    )
    captured: Any = with_capture(model)
    captured.set_dspark_layers_to_capture([1])
    with torch.no_grad():
        captured(IDS, use_cache=True)
        with pytest.raises(TapError, match=r"with a static cache its rows differ .* Use the model's own dynamic cache"):
            captured(IDS, cache=StaticCache(config=model.config, max_cache_len=8))
        scaled.remove()
        captured.set_dspark_layers_to_capture([1])
        captured(IDS, cache=StaticCache(config=model.config, max_cache_len=8))


class Averaging(nn.Module):
    """Adds the mean of the first tokens of the batch, as experts of limited capacity let sequences meet."""

    def forward(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return output + 0.1 * output[:, :1].mean(0, keepdim=True)


def test_a_model_whose_sequences_meet_is_refused_in_batches() -> None:
    model: Any = tiny.build("llama")
    model.model.layers[0].register_forward_hook(Averaging().forward)
    with torch.no_grad(), tap(model, [1]) as t:
        with pytest.raises(TapError, match="from those of the same sequence alone"):
            t.run(IDS, lengths=[3, 6])
        assert t.run(IDS[:1]).rows().shape[0] == 6


def test_a_probe_is_run_once_and_not_before_the_first_padded_call() -> None:
    model, calls = tiny.build("llama"), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    with torch.no_grad(), tap(model, [1]) as t:
        t.run(IDS)
        calls.clear()
        t.run(IDS)
        assert len(calls) == 1
        t.run(IDS, lengths=[3, 6])
        assert len(calls) > 2
        calls.clear()
        t.run(IDS, lengths=[2, 6])
        assert len(calls) == 1


def test_trying_a_model_moves_neither_its_random_numbers_nor_its_mode() -> None:
    model: Any = build("gpt2", resid_pdrop=0.5, embd_pdrop=0.5).train()
    model.transformer.h[1].eval()
    torch.manual_seed(7)
    expected = model(IDS, use_cache=False).logits
    torch.manual_seed(7)
    with tap(model, [1], stop_early=False) as t:
        assert torch.equal(t.run(IDS).output.logits, expected)
        before = torch.random.get_rng_state()
        t._company.require("right padding without a mask")
        t._company.require("left padding with position ids")
        assert torch.equal(torch.random.get_rng_state(), before)
    assert [block.training for block in model.transformer.h] == [True, False, True, True]


SPARSE = {"glm_moe_dsa": "model.layers", "deepseek_v32": "model.layers", "axk2": "model.layers"}


@pytest.mark.parametrize("family", SPARSE)
def test_sparse_attention_is_refused_in_company_past_its_budget_and_exact_up_to_it(family: str) -> None:
    model, ids = build(family, index_topk=8), tiny.token_ids(2, 12)
    expected = rows_alone(model, [ids[0, :5], ids[1, :8]], SPARSE[family], 2)
    with torch.no_grad(), tap(model, [2]) as t:
        torch.testing.assert_close(t.run(ids[:, :8], lengths=[5, 8]).rows()[:, 0], expected, atol=1e-4, rtol=1e-4)
        with pytest.raises(
            TapError, match=r"attends to 8 selected positions.* sequences of 5 to 9, padded to one width"
        ):
            t.run(ids[:, :9], lengths=[5, 9])
        mask = torch.ones(2, 9).long()
        mask[0, :4] = 0
        with pytest.raises(TapError, match="attends to 8 selected positions"):
            t.run(ids[:, :9], attention_mask=mask)
        alone = t.run(ids[1:]).rows()[:, 0]
        cache = t.run(ids[:1, :8], use_cache=True).output.cache
        with pytest.raises(TapError, match="a cache that holds 8"):
            t.run(ids[:1, 8:9], cache=cache)
    assert torch.equal(alone, rows_alone(model, [ids[1]], SPARSE[family], 2))


@pytest.mark.parametrize("family", ["nemotron_h", "granitemoehybrid"])
def test_a_mask_wider_than_a_static_cache_and_its_call_is_refused_where_recurrent_layers_read_its_end(
    family: str,
) -> None:
    model = build(family)
    positions = torch.arange(6).repeat(2, 1)
    wide, narrow = torch.ones(2, 9).long(), torch.ones(2, 6).long()
    wide[:, 6:] = 0
    with torch.no_grad(), tap(model, [2]) as t:
        new = lambda: StaticCache(config=model.config, max_cache_len=9)  # noqa: E731
        with pytest.raises(TapError, match="with a static cache, a wider mask and position ids its rows differ"):
            t.run(IDS, attention_mask=wide, position_ids=positions, cache=new())
        with pytest.raises(TapError, match="with a static cache and a wider mask its rows differ"):
            t.run(IDS, attention_mask=wide, cache=new())
        assert t.run(IDS, attention_mask=narrow, cache=new()).rows().shape[0] == 12


def test_a_wider_mask_on_a_static_cache_stays_open_where_it_is_right() -> None:
    model = build("llama")
    wide = torch.ones(2, 9).long()
    wide[:, 6:] = 0
    expected = rows_alone(model, [IDS[0], IDS[1]], "model.layers", 2)
    with torch.no_grad(), tap(model, [2]) as t:
        cache = StaticCache(config=model.config, max_cache_len=9)
        rows = t.run(IDS, attention_mask=wide, cache=cache).rows()[:, 0]
    torch.testing.assert_close(rows, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "jamba"])
def test_several_tokens_behind_a_recurrent_state_are_refused_and_one_is_not(family: str) -> None:
    model = build(family)
    with torch.no_grad(), tap(model, [2], stop_early=False) as t:
        output = t.run(IDS[:1, :3], use_cache=True).output
        name = next(name for name in ("cache", "cache_params", "past_key_values") if output.get(name) is not None)
        output = t.run(IDS[:1, 3:4], use_cache=True, **{name: output[name]}).output
        with pytest.raises(TapError, match=r"with several tokens behind a cache .* Run one token at a time"):
            t.run(IDS[:1, 4:], use_cache=True, **{name: output[name]})


@pytest.mark.parametrize("family", ["electra", "bert", "gemma3_text"])
def test_one_token_behind_a_cache_is_refused_where_earlier_rows_see_later_tokens(family: str) -> None:
    fields = {"use_bidirectional_attention": True} if family == "gemma3_text" else {"is_decoder": False}
    captured: Any = with_capture(build(family, **fields))
    captured.set_dspark_layers_to_capture([3])
    with pytest.raises(TapError, match=r"with one token behind a cache .* Run the whole sequence without a cache"):
        captured.generate(IDS[:1], max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)


@pytest.mark.parametrize("family", ["llama", "mamba", "jamba", "gemma2", "rwkv"])
def test_one_token_behind_a_cache_is_that_of_the_whole_sequence(family: str) -> None:
    model, paths = build(family), {"mamba": "backbone.layers", "rwkv": "rwkv.blocks"}
    expected = rows_alone(model, [IDS[0]], paths.get(family, "model.layers"), 2)
    rows, held = [], {"use_cache": True}
    with torch.no_grad(), tap(model, [2], stop_early=False) as t:
        for columns in (slice(0, 4), slice(4, 5), slice(5, 6)):
            captured = t.run(IDS[:1, columns], **held)
            name = next(
                name for name in ("cache", "cache_params", "past_key_values", "state") if captured.output.get(name)
            )
            rows, held = [*rows, captured.rows()[:, 0]], {"use_cache": True, name: captured.output[name]}
    torch.testing.assert_close(torch.cat(rows), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("static", [False, True])
def test_several_tokens_behind_a_cache_of_keys_are_those_of_the_whole_sequence(static: bool) -> None:
    model = build("llama")
    expected = rows_alone(model, [IDS[0]], "model.layers", 2)
    given = {"cache": StaticCache(config=model.config, max_cache_len=8)} if static else {"use_cache": True}
    with torch.no_grad(), tap(model, [2], stop_early=False) as t:
        first = t.run(IDS[:1, :3], **given)
        second = t.run(IDS[:1, 3:], cache=first.output.cache)
    rows = torch.cat([first.rows(), second.rows()])[:, 0]
    torch.testing.assert_close(rows, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def rows_in_steps(model: Any, ids: Tensor, path: str, layer: int) -> Tensor:
    """(S, H) of a layer: four of the ids (S,), then one at a time on the model's own cache, noted by a hook of the test."""
    seen: list[Tensor] = []
    handle = model.get_submodule(path)[layer].register_forward_hook(
        lambda _module, _args, out: seen.append((out[0] if isinstance(out, tuple) else out)[0].clone())
    )
    cache = model(ids[None, :4], use_cache=True).past_key_values
    for token in ids[4:]:
        cache = model(token[None, None], past_key_values=cache, use_cache=True).past_key_values
    handle.remove()
    return torch.cat(seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_over_what_is_decoded_alone_is_found_though_it_is_longer_than_a_probe_of_few_tokens(dtype) -> None:
    model, path, ids = build("unlimited_ocr"), "model.language_model.layers", tiny.token_ids(1, 40)[0]
    model.config.text_config.sliding_window = window = 12
    stepped, whole = rows_in_steps(model, ids, path, 2), rows_alone(model, [ids], path, 2)
    torch.testing.assert_close(stepped[: 4 + window], whole[: 4 + window], atol=1e-4, rtol=1e-4)
    assert float((stepped - whole)[-4:].norm() / whole[-4:].norm()) > 0.05
    with torch.no_grad(), tap(model.to(dtype), [2], stop_early=False) as t:
        for way in ("one token behind a cache", "several tokens behind a cache", "a static cache"):
            with pytest.raises(TapError, match=f"with {way} its rows differ"):
                t._company.require(way)
        t._company.require("right padding without a mask")


@pytest.mark.parametrize("family", ["gpt_oss", "mistral", "gemma3_text"])
def test_a_window_that_a_plain_forward_has_too_stays_open_behind_a_cache(family: str) -> None:
    model, ids = build(family, sliding_window=12), tiny.token_ids(1, 40)[0]
    stepped = rows_in_steps(model, ids, "model.layers", 2)
    torch.testing.assert_close(stepped, rows_alone(model, [ids], "model.layers", 2), atol=1e-3, rtol=1e-3)
    with torch.no_grad(), tap(model, [2], stop_early=False) as t:
        for way in ("one token behind a cache", "several tokens behind a cache", "a static cache"):
            t._company.require(way)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("beam", {}),
        ("ministral3", {"rope_parameters": SCALED}),
    ],
)
def test_a_scale_that_grows_slowly_with_the_position_makes_positions_be_counted_from_the_mask(family, fields) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {family}")
    model, wide = build(family, **fields, max_position_embeddings=131072), 3000
    ids, mask = torch.cat([IDS[1].repeat(wide)[:wide], IDS[0]])[None], torch.tensor([[0] * wide + [1] * 6])
    expected = rows_alone(model, [IDS[0]], "model.layers", 3)
    seen: list[Tensor] = []
    handle = model.model.layers[3].register_forward_hook(
        lambda _m, _a, out: seen.append((out[0] if isinstance(out, tuple) else out)[0, -6:].clone())
    )
    with torch.no_grad():
        model(ids, attention_mask=mask, use_cache=False)
        handle.remove()
        assert float((seen[0] - expected).norm() / expected.norm()) > 1e-3
        with tap(model, [3]) as t:
            torch.testing.assert_close(t.run(ids, attention_mask=mask).rows()[:, 0], expected, atol=1e-4, rtol=1e-4)


def test_rotary_embeddings_alone_need_no_positions_counted_from_the_mask() -> None:
    with torch.no_grad(), tap(build("llama", max_position_embeddings=131072), [2]) as t:
        assert not t._company.counts_positions()


def test_left_padding_is_refused_where_attention_is_scaled_by_the_column() -> None:
    model = build("llama4_text", floor_scale=16, no_rope_layers=[0] * 4)
    ids, real = tiny.token_ids(1, 16), torch.ones(1, 16, dtype=torch.int64)
    left, right = torch.cat([real[:, :4] * 0, real[:, 4:]], 1), torch.cat([real[:, :12], real[:, 12:] * 0], 1)
    with torch.no_grad(), tap(model, [2]) as t:
        with pytest.raises(
            TapError, match=r"scales attention by the column from column 16 on.*found 16 columns\. Pad on"
        ):
            t.run(ids, attention_mask=left)
        short = t.run(ids[:, :15], attention_mask=left[:, :15]).rows()[:, 0]
        rows = t.run(ids, attention_mask=right).rows()[:, 0]
    torch.testing.assert_close(short, rows_alone(model, [ids[0, 4:15]], "model.layers", 2), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(rows, rows_alone(model, [ids[0, :12]], "model.layers", 2), atol=1e-4, rtol=1e-4)
