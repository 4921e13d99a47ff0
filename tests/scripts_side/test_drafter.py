"""What a fresh drafter takes from its target."""

import json
from pathlib import Path

import torch
from training.context import TargetHead
from training.drafter import drafter_config, new_drafter
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, MuseGlimmerAssistantModel

from hiddentap.models.draft_config import read_draft_config

TARGET = LlamaConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=1,
    vocab_size=30,
)


def test_it_is_as_wide_as_the_target_and_its_heads_share_no_keys() -> None:
    config = drafter_config(TARGET, [0, 1], layers=2, block_size=4, mask_token_id=7)
    assert (config.hidden_size, config.intermediate_size, config.head_dim) == (16, 24, 4)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 4)
    assert (config.target_layer_ids, config.block_size, config.mask_token_id) == ([0, 1], 4, 7)


def test_its_config_says_what_serving_engines_look_for(tmp_path: Path) -> None:
    config = drafter_config(TARGET, [0, 1], layers=2, block_size=4, mask_token_id=7)
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["vocab_size"] == 30
    assert written["dflash_config"] == {"mask_token_id": 7, "target_layer_ids": [0, 1]}
    again = AutoConfig.from_pretrained(tmp_path)
    assert (again.vocab_size, again.target_layer_ids, again.mask_token_id) == (30, [0, 1], 7)
    # vLLM and SGLang add 1 to these ids: the outputs of layers 0 and 1.
    for engine in ("vllm", "sglang"):
        assert read_draft_config(tmp_path).boundaries(3, engine, ["llama"]) == (1, 2)


def test_its_last_norm_begins_as_the_targets() -> None:
    target = LlamaForCausalLM(TARGET)
    torch.nn.init.uniform_(target.model.norm.weight, 0.5, 3.0)
    head = TargetHead(target.model.embed_tokens, target.lm_head.weight, target.model.norm, TARGET)
    config = drafter_config(TARGET, [0, 1], layers=1, block_size=4, mask_token_id=7)
    drafter = new_drafter(config, head, torch.ones(32), seed=0)
    states = torch.randn(5, 16)
    with torch.no_grad():
        torch.testing.assert_close(drafter.model.norm(states), target.model.norm(states), rtol=1e-4, atol=1e-4)


def test_beside_random_weights_it_hands_on_the_last_captured_layer_as_it_is() -> None:
    head = TargetHead(torch.nn.Embedding(30, 16), torch.ones(30, 16), None, TARGET)
    config = drafter_config(TARGET, [0, 1], layers=1, block_size=4, mask_token_id=7)
    scale = torch.cat([torch.ones(16), torch.linspace(1, 31, 16)])
    served = new_drafter(config, head, scale, seed=0).served_state()
    torch.manual_seed(0)
    random = MuseGlimmerAssistantModel(config).state_dict()
    added = served["encoder.fc.weight"] - random["encoder.fc.weight"] / scale
    torch.testing.assert_close(added, torch.cat([torch.zeros(16, 16), torch.eye(16) / 15], 1))
    for name in ("layers.0.self_attn.v_proj.weight", "layers.0.self_attn.o_proj.weight"):
        torch.testing.assert_close(served[name] - random[name], torch.eye(16))


def test_a_seed_gives_the_same_weights_again_and_another_seed_others() -> None:
    head = TargetHead(torch.nn.Embedding(30, 16), torch.ones(30, 16), None, TARGET)
    config = drafter_config(TARGET, [0, 1], layers=1, block_size=4, mask_token_id=7)
    first, again, other = (
        new_drafter(config, head, torch.ones(32), seed).model.encoder.fc.weight for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
