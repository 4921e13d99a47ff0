"""The training forward over many anchors, beside the drafter class's own cached forward, one anchor at a time."""

import pytest
import torch
from torch import nn
from training.blocks import IGNORED, block_states, make_blocks, possible_anchors, sample_anchors
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache

K, H, B, MASK = 2, 32, 4, 5


def make_drafter(**fields: object) -> MuseGlimmerAssistantModel:
    torch.manual_seed(0)
    config = MuseGlimmerAssistantConfig(
        hidden_size=H, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        block_size=B, mask_token_id=MASK, target_layer_ids=[0, 2], pad_token_id=0, bos_token_id=1, eos_token_id=2,
        **({"layer_types": ["full_attention"] * 2} | fields),
    )  # fmt: skip
    model = MuseGlimmerAssistantModel(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4.0 if weight.ndim > 1 else 1.0).add_(torch.randn_like(weight) * 0.05)
    return model


def make_pack(*lengths: int) -> dict:
    T, generator = sum(lengths), torch.Generator().manual_seed(1)
    return {
        "input_ids": torch.randint(8, 90, (T,), generator=generator),
        "loss_mask": torch.ones(T, dtype=torch.uint8),
        "segment_ids": torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), torch.tensor(lengths)),
        "position_ids": torch.cat([torch.arange(length) for length in lengths]),
        "aux_hidden_states": torch.randn(T, K, H, generator=generator),
    }


@torch.no_grad()
def served(
    drafter: nn.Module, embeddings: nn.Module, states: torch.Tensor, ids: torch.Tensor, steps: list[int]
) -> torch.Tensor:
    """(B, H) of the last step, as assisted decoding calls the class: a call per step, its block cropped off the cache afterwards.

    states: (S, K * H) and ids: (S,) of one sample; steps: the anchors, ascending, each with all rows before it as context.
    """
    cache = DFlashCache(config=drafter.config)
    cache.activate_past_recording()
    seen = 0
    for anchor in steps:
        if seen:
            cache.crop(-B)
        cache.set_previous_accepted_tokens(anchor - seen)
        output = drafter(
            noise_embeds=embeddings(torch.tensor([[int(ids[anchor])] + [MASK] * (B - 1)])),
            context_hidden_states=states[None, seen:anchor],
            position_ids=torch.arange(seen, anchor + B)[None],
            attention_mask=torch.ones(1, anchor + B, dtype=torch.long),
            cache=cache,
        )
        seen = anchor
    return output.last_hidden_state[0]


def test_one_anchor_gives_what_the_cached_forward_gives() -> None:
    drafter, embeddings, pack = make_drafter(), nn.Embedding(96, H), make_pack(12)
    context = pack["aux_hidden_states"].flatten(1)
    blocks = make_blocks(pack, torch.tensor([7]), B, MASK)
    with torch.no_grad():
        found = block_states(drafter, embeddings, context, blocks)[0]
    expected = served(drafter, embeddings, context, pack["input_ids"], [2, 3, 7])[1:]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_many_anchors_of_several_samples_give_each_what_it_gets_alone() -> None:
    drafter, embeddings, pack = make_drafter(), nn.Embedding(96, H), make_pack(9, 12, 6)
    context, anchors = pack["aux_hidden_states"].flatten(1), torch.tensor([3, 7, 10, 15, 19, 24])
    with torch.no_grad():
        found = block_states(drafter, embeddings, context, make_blocks(pack, anchors, B, MASK))
    starts = {0: 0, 1: 9, 2: 21}
    for place, anchor in enumerate(anchors.tolist()):
        start = starts[int(pack["segment_ids"][anchor])]
        expected = served(drafter, embeddings, context[start:], pack["input_ids"][start:], [anchor - start])[1:]
        torch.testing.assert_close(found[place], expected, atol=1e-5, rtol=0)


def test_the_anchors_own_row_and_later_ones_change_nothing() -> None:
    drafter, embeddings, pack = make_drafter(), nn.Embedding(96, H), make_pack(12)
    blocks = make_blocks(pack, torch.tensor([5]), B, MASK)
    context = pack["aux_hidden_states"].flatten(1)
    changed = {row: context.clone().index_fill_(0, torch.tensor([row]), 9.0) for row in (4, 5, 6)}
    with torch.no_grad():
        before = block_states(drafter, embeddings, context, blocks)
        same = {row: torch.equal(before, block_states(drafter, embeddings, c, blocks)) for row, c in changed.items()}
    assert same == {4: False, 5: True, 6: True}


def test_labels_are_the_tokens_behind_the_anchor_within_its_sample() -> None:
    pack = make_pack(5, 4)
    pack["input_ids"] = torch.arange(100, 109)
    pack["loss_mask"][3] = 0
    blocks = make_blocks(pack, torch.tensor([1, 3, 6]), B, MASK)
    assert blocks.ids.tolist() == [[101, 5, 5, 5], [103, 5, 5, 5], [106, 5, 5, 5]]
    assert blocks.labels.tolist() == [[102, IGNORED, 104], [104, IGNORED, IGNORED], [107, 108, IGNORED]]
    assert blocks.position_ids[0, 9:].tolist() == [1, 2, 3, 4, 3, 4, 5, 6, 1, 2, 3, 4]


def test_anchors_have_context_before_and_a_supervised_token_behind() -> None:
    pack = make_pack(5, 4)
    pack["loss_mask"] = torch.tensor([0, 0, 0, 1, 1, 1, 1, 0, 1], dtype=torch.uint8)
    assert possible_anchors(pack).tolist() == [2, 3, 7]


def test_each_sequence_gives_at_most_its_number_of_anchors() -> None:
    pack = make_pack(30, 4, 20)
    anchors = sample_anchors(pack, 6, torch.Generator().manual_seed(0))
    assert torch.bincount(pack["segment_ids"][anchors]).tolist() == [6, 2, 6]
    assert set(anchors.tolist()) <= set(possible_anchors(pack).tolist())
    assert anchors.tolist() == sorted(set(anchors.tolist()))
    assert anchors.tolist() != sample_anchors(pack, 6, torch.Generator().manual_seed(1)).tolist()


def test_a_drafter_with_sliding_layers_is_refused() -> None:
    drafter = make_drafter(layer_types=["sliding_attention", "full_attention"])
    pack = make_pack(8)
    with pytest.raises(ValueError, match="full_attention layers only"):
        block_states(drafter, nn.Embedding(96, H), torch.zeros(8, K * H), make_blocks(pack, torch.tensor([3]), B, MASK))
