"""Forty families, one for each structure that a causal LM may have: what is tapped has the bits of the record of every module.

Each model runs three times: recorded, watched when the taps are attached, tapped.
"""

from pathlib import Path

import pytest
import torch

from hiddentap.hooks import TapError, tap
from hiddentap.models.decoder import DecoderNotFoundError, find_decoder
from hiddentap.models.errors import UsageError
from support import architectures
from support.recorder import Truth, equal, record, truth_of
from support.streamed_rows import Streamed, rows_of, settings, streamed

# model type -> where its layers are, its final norm, and what makes it worth a place here.
EXACT = {
    "llama": ("model.layers", "model.norm", "the common form"),
    "gpt_oss": ("model.layers", "model.norm", "experts and sliding windows"),
    "deepseek_v3": ("model.layers", "model.norm", "latent attention, dense layers before experts"),
    "kimi_linear": ("model.layers", "model.norm", "linear attention"),
    "gemma2": ("model.layers", "model.norm", "scaled embeddings, soft caps"),
    "gemma4_text": ("model.layers", "model.norm", "layers that share keys and values; a config that raises when read"),
    "recurrent_gemma": ("model.layers", "model.final_norm", "recurrent blocks"),
    "cohere": ("model.layers", "model.norm", "parallel attention and MLP, scaled logits"),
    "minicpm3": ("model.layers", "model.norm", "what the head takes in is scaled"),
    "gpt2": ("transformer.h", "transformer.ln_f", "another path"),
    "dbrx": ("transformer.blocks", "transformer.norm_f", "another path"),
    "gpt_neox_japanese": ("gpt_neox_japanese.layers", "gpt_neox_japanese.final_layer_norm", "a tuple with a bias"),
    "bloom": ("transformer.h", "transformer.ln_f", "a tuple with the attention map"),
    "falcon": ("transformer.h", "transformer.ln_f", "a tuple with None"),
    "falcon_h1": ("model.layers", "model.final_layernorm", "a tuple of one"),
    "openai-gpt": ("transformer.h", None, "a list; no final norm"),
    "glm_moe_dsa": ("model.layers", "model.norm", "a tuple with chosen positions"),
    "zaya": ("model.layers", "model.norm", "a tuple with the router's state"),
    "xlstm": ("backbone.blocks", "backbone.out_norm", "a tuple with a tuple of states"),
    "mamba": ("backbone.layers", "backbone.norm_f", "hidden_states is off by one"),
    "mamba2": ("backbone.layers", "backbone.norm_f", "hidden_states is off by one"),
    "falcon_mamba": ("backbone.layers", "backbone.norm_f", "hidden_states is off by one"),
    "jamba": ("model.layers", "model.final_layernorm", "attention and Mamba layers in turn"),
    "zamba2": ("model.layers", "model.final_layernorm", "blocks that share weights and take the embeddings along"),
    "lfm2": ("model.layers", "model.embedding_norm", "the final norm is called embedding_norm"),
    "nanochat": ("model.layers", "model.norm", "the final norm also norms the embeddings"),
    "bert": ("bert.encoder.layer", None, "no final norm, but one inside the head"),
    "roberta-prelayernorm": ("roberta_prelayernorm.encoder.layer", "roberta_prelayernorm.LayerNorm", "a norm above"),
    "opt": ("model.decoder.layers", "model.decoder.final_layer_norm", "a decoder inside the decoder"),
    "bart": ("model.decoder.layers", None, "the config states the depth of the encoder that is not there"),
    "longcat_flash": ("model.layers", "model.norm", "the config states twice the depth"),
    "llama4_text": ("model.layers", "model.norm", "get_decoder answers with the whole model"),
    "modernbert-decoder": ("model.layers", "model.final_norm", "get_decoder answers with the output projection"),
    "kimi_k25": ("model.language_model.layers", "model.language_model.norm", "a vision tower beside the text layers"),
    "qwen3_vl": ("model.language_model.layers", "model.language_model.norm", "deepstack between the layers"),
}  # fmt: skip

THROUGH_AN_ADAPTER = {
    "deepseek_v4": ("hyper_connections.mean", lambda state: state.mean(2), 32),
    "hy_v4": ("hyper_connections.streams", lambda state: state.flatten(2), 128),
    "qwen4_exp_text": ("hyper_connections.mean", lambda state: state.unflatten(-1, (4, 32)).mean(2), 32),
    "gemma3n_text": ("altup.streams", lambda state: torch.cat(list(state), -1), 128),
    "inkling2_text": ("attention_residuals.prefix", lambda state: state, 32),
}

REFUSED = {
    "blt": (DecoderNotFoundError, "expected one list of its layers, found model.local_encoder.layers"),
    "hrm_text": (DecoderNotFoundError, "found model.L_module.layers .4 x HrmTextDecoderLayer., model.H_module.layers"),
    "xlm": (DecoderNotFoundError, "expected one list of 4 layers, found none"),
    "dory": (TapError, "model.layers.1 ran 2 times in one forward"),
    "cpmant": (TapError, r"boundary 2 .*handles a float32 tensor \(2, 9, 32\) in a forward of 2 sequences of 5 tokens"),
    "prophetnet": (
        TapError,
        r"boundary 2 .*handles a float32 tensor \(2, 15, 32\) in a forward of 2 sequences of 5 tokens",
    ),
    "xlnet": (TapError, r"boundary 2 of XLNetLMHeadModel cannot be tapped: .* handles a float32 tensor \(5, 2, 32\)"),
    "reformer": (TapError, r"item 1 looks just like the hidden state at item 0.*--adapter hidden_residual.sum"),
    "musicgen": (TapError, "MusicgenForCausalLM did not run on token ids alone"),
    "gemma4_assistant": (TapError, "did not run on token ids alone.*shared_kv_states cannot be None"),
}

# Families whose tiny model transformers does not load again from its own folder.
NOT_LOADED = {"inkling2_text", "mllama", "inkling2_loop_text"}
# Families that are not streamed, and why.
NOT_STREAMED = {
    "openai-gpt": (DecoderNotFoundError, "Streamed weights need layers that are found without running the model"),
    "xlnet": (DecoderNotFoundError, "Streamed weights need layers that are found without running the model"),
    "rwkv": (UsageError, r"changes rwkv\.blocks\.\d+\..* in place while it runs"),
    "blt": REFUSED["blt"], "hrm_text": REFUSED["hrm_text"],
    "xlm": (DecoderNotFoundError, "Streamed weights need layers that are found without running the model"),
    "dory": (UsageError, "enters its decoder layers in the order 0, 1, 2, 3, 0, 1, 2, 3; weights are streamed from the first"),
    "cpmant": REFUSED["cpmant"], "prophetnet": REFUSED["prophetnet"],
    "gemma4_assistant": REFUSED["gemma4_assistant"],
}  # fmt: skip
STREAMED = {*EXACT, *THROUGH_AN_ADAPTER} - NOT_LOADED - NOT_STREAMED.keys()

IDS = architectures.token_ids(2, 7)


def truth_and_model(model_type: str) -> tuple[Truth, torch.nn.Module]:
    model = architectures.build(model_type)
    recorder, _ = record(model, IDS, use_cache=False)
    truth = truth_of(recorder)
    assert truth is not None
    return truth, model


@pytest.mark.parametrize("model_type", EXACT)
def test_boundaries_and_norm_states_have_the_recorded_bits(model_type: str) -> None:
    path, norm, _ = EXACT[model_type]
    truth, model = truth_and_model(model_type)
    assert (truth.path, truth.norm_path) == (path, norm)
    with torch.no_grad(), tap(model, range(truth.n + 1), "boundary", final="both" if norm else "none") as t:
        captured = t.run(IDS)
    for b, state in enumerate(captured.aux_hidden_states):
        assert b == 0 or equal(state, truth.layer_out[b - 1]), f"boundary {b} is not what layer {b - 1} gave out"
        assert b == truth.n or equal(state, truth.layer_in[b]), f"boundary {b} is not what layer {b} took in"
    if norm:
        assert equal(captured.pre_norm, truth.pre)
        assert equal(captured.post_norm, truth.post)
    else:
        with pytest.raises(TapError, match="no final norm was found"), tap(model, [1], final="post"):
            pass


@pytest.mark.parametrize("model_type", THROUGH_AN_ADAPTER)
def test_irregular_streams_are_refused_plainly_and_exact_through_an_adapter(model_type: str) -> None:
    adapter, read, width = THROUGH_AN_ADAPTER[model_type]
    truth, model = truth_and_model(model_type)
    with pytest.raises(TapError, match=f"boundary 2 .*{adapter}"), tap(model, [2], "boundary"):
        pass
    with torch.no_grad(), tap(model, range(truth.n + 1), "boundary", adapter=adapter) as t:
        captured = t.run(IDS)
    for b, state in enumerate(captured.aux_hidden_states):
        assert state.shape == (2, 7, width)
        assert equal(state, read(truth.layer_out[b - 1] if b else truth.layer_in[0])), f"boundary {b}"


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_no_rule_fits_is_refused_with_the_reason(model_type: str) -> None:
    error, text = REFUSED[model_type]
    with (
        torch.no_grad(),
        pytest.raises(error, match=f"(?s){text}"),
        tap(architectures.build(model_type), [2], "boundary") as t,
    ):
        t.run(IDS)


def test_layers_that_are_skipped_without_an_image_are_refused_by_name_and_the_others_are_exact() -> None:
    truth, model = truth_and_model("mllama")
    assert truth.visits == [1, 0, 1, 1]
    with pytest.raises(TapError, match=r"model\.layers\.1 ran 0 times in one forward"), tap(model, [1]):
        pass
    with torch.no_grad(), tap(model, [0, 2, 3]) as t:
        captured = t.run(IDS)
    assert all(equal(captured.aux_hidden_states[k], truth.layer_out[i]) for k, i in enumerate((0, 2, 3)))


def test_a_stream_that_is_halved_between_layers_is_refused_there_alone_unless_the_next_input_is_asked_for() -> None:
    truth, model = truth_and_model("rwkv")
    assert truth.broken == [2]
    with pytest.raises(TapError, match=r"boundary 2 .*rwkv\.blocks\.1 gives out is not.*next_input"), tap(model, [1]):
        pass
    with torch.no_grad(), tap(model, [0, 2]) as t:
        captured = t.run(IDS)
    assert equal(captured.aux_hidden_states[0], truth.layer_out[0])
    assert equal(captured.aux_hidden_states[1], truth.layer_out[2])
    with torch.no_grad(), tap(model, [1], adapter="next_input") as t:
        assert equal(t.run(IDS).aux_hidden_states[0], truth.layer_in[2])


def test_a_loop_of_layers_is_refused_inside_and_exact_around_it() -> None:
    truth, model = truth_and_model("inkling2_loop_text")
    assert truth.visits == [1, 1, 3, 3, 1, 1]
    adapter = "attention_residuals.prefix"
    with (
        pytest.raises(TapError, match=r"model\.layers\.3 ran 3 times in one forward"),
        tap(model, [3], adapter=adapter),
    ):
        pass
    with torch.no_grad(), tap(model, [1, 4, 5], adapter=adapter) as t:
        captured = t.run(IDS)
    assert all(equal(captured.aux_hidden_states[k], truth.layer_out[i]) for k, i in enumerate((1, 4, 5)))


def test_deepstack_is_read_at_the_input_of_the_next_layer_without_being_asked() -> None:
    assert find_decoder(architectures.build("qwen3_vl")).adapter_name == "next_input"
    assert find_decoder(architectures.build("llama")).adapter_name is None


@pytest.mark.parametrize("model_type", sorted(STREAMED))
def test_streamed_rows_have_the_bits_of_rows_in_memory_one_by_one_and_in_batches(
    model_type: str, tmp_path: Path
) -> None:
    model = architectures.build(model_type)
    _, norm, _ = EXACT.get(model_type, ("", None, ""))
    adapter, *_ = THROUGH_AN_ADAPTER.get(model_type, (None,))
    layer_ids = range(find_decoder(model).n)
    found = streamed(model, tmp_path, layer_ids, final="both" if norm else "none", adapter=adapter)
    assert found == Streamed("equal")


@pytest.mark.parametrize("model_type", NOT_STREAMED)
def test_what_is_not_streamed_is_refused_with_the_reason(model_type: str, tmp_path: Path) -> None:
    error, text = NOT_STREAMED[model_type]
    architectures.build(model_type).save_pretrained(tmp_path)
    with pytest.raises(error, match=f"(?s){text}"):
        rows_of(settings(tmp_path, [1], stream_weights=True))
