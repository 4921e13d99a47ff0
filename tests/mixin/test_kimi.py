"""Kimi classes that carry the mixin from the start."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from hiddentap.capture.mixin import kimi
from support import tiny

IDS = tiny.token_ids(2, 6)
PLAIN = {
    "KimiLinearForCausalLM": lambda: tiny.build("kimi_linear"),
    "DeepseekV3ForCausalLM": lambda: tiny.build("deepseek_v3"),
    "Kimi_K25ForConditionalGeneration": tiny.build_kimi_k25,
}


def with_mixin(name: str) -> nn.Module:
    plain = PLAIN[name]()
    model = getattr(kimi, name)(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    return model


@pytest.mark.parametrize("name", PLAIN)
def test_states_and_generated_tokens_are_those_of_the_plain_class(name: str) -> None:
    plain, model = PLAIN[name](), with_mixin(name)
    hs = PLAIN[name]()(IDS, output_hidden_states=True, use_cache=False).hidden_states
    model.set_dspark_layers_to_capture([0, 2])
    output = model(IDS, use_cache=False)
    assert torch.equal(output.aux_hidden_states[0], hs[1])
    assert torch.equal(output.aux_hidden_states[1], hs[3])
    assert torch.equal(output.logits, plain(IDS, use_cache=False).logits)
    settings = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 3, "do_sample": False}
    assert torch.equal(model.generate(IDS, **settings), plain.generate(IDS, **settings))


@pytest.mark.parametrize("name", PLAIN)
def test_a_saved_model_is_one_of_transformers_own(name: str, tmp_path: Path) -> None:
    model = with_mixin(name)
    model.set_dspark_layers_to_capture([1])
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [name]
    loaded = getattr(transformers, name).from_pretrained(tmp_path)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    again = getattr(kimi, name).from_pretrained(tmp_path)
    again.set_dspark_layers_to_capture([1])
    assert torch.equal(again(IDS).aux_hidden_states[0], model(IDS).aux_hidden_states[0])
