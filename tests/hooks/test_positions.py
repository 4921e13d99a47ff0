"""Which positions of a batch are real."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, LlamaConfig, StaticCache

from hiddentap.hooks import (
    Held,
    LengthTypeError,
    PositionsError,
    RealPositions,
    lone_pad_id,
    real_before,
    real_positions,
)


def test_lengths_name_the_first_positions_of_each_row() -> None:
    positions = RealPositions.from_lengths([3, 5, 2], 3, 5)
    assert positions.flat_index().tolist() == [0, 1, 2, 5, 6, 7, 8, 9, 10, 11]
    assert (positions.T, positions.all_real) == (10, False)


def test_a_left_padded_mask_names_the_last_positions() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    positions = RealPositions.from_attention_mask(mask, 2, 4)
    assert (positions.starts, positions.lengths) == ((2, 0), (2, 4))
    assert positions.flat_index().tolist() == [2, 3, 4, 5, 6, 7]


def test_a_mask_behind_a_cache_speaks_of_the_columns_behind_what_is_held() -> None:
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    positions = RealPositions.from_attention_mask(mask, 2, 1, Held(3))
    assert (positions.starts, positions.lengths) == ((0, 0), (1, 1))


def test_a_mask_as_wide_as_a_static_cache_speaks_of_the_columns_of_the_call_and_not_of_its_last_ones() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0]])
    first = RealPositions.from_attention_mask(mask, 1, 6, Held(0, room=8))
    assert (first.starts, first.lengths) == ((2,), (4,))
    second = RealPositions.from_attention_mask(torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0]]), 1, 1, Held(6, room=8))
    assert (second.starts, second.lengths) == ((0,), (1,))


@pytest.mark.parametrize(
    ("width", "held", "expected"),
    [
        (9, Held(), r"\(2, 9\); expected \(2, 6\)\."),
        (5, Held(), r"\(2, 5\); expected \(2, 6\)\."),
        (6, Held(2), r"expected \(2, 8\), 2 positions of a cache and 6 of this call"),
        (9, Held(2, room=10), r"expected \(2, 8\) or \(2, 10\)"),
    ],
)
def test_a_mask_of_another_width_is_refused(width: int, held: Held, expected: str) -> None:
    with pytest.raises(PositionsError, match=expected):
        real_positions(None, 2, 6, attention_mask=torch.ones(2, width, dtype=torch.int64), held=held)


def test_what_a_cache_holds_is_asked_of_the_cache() -> None:
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2)
    assert Held.by(None) == Held(0, None)
    assert Held.by(DynamicCache(config=config)) == Held(0, None)
    assert Held.by(StaticCache(config=config, max_cache_len=8)) == Held(0, 8)
    with pytest.raises(PositionsError, match="the cache is a list, which cannot tell"):
        Held.by([1])


def test_real_positions_of_a_cache_are_counted_in_the_mask_before_the_call() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    assert real_before(mask, 4, 2) == (2, 4)
    assert real_before(None, 4, 2) == (4, 4)
    assert real_before(mask[:, :3], 4, 2) == (4, 4)


@pytest.mark.parametrize(
    "lengths",
    [
        [5.9, 4],
        ["5", 4],
        [True, True],
        torch.tensor([5.0, 4.0]),
        torch.tensor([True, False]),
        np.array([5.0, 4.0]),
        [None, 4],
    ],
    ids=repr,
)
def test_lengths_that_are_no_plain_integers_are_a_type_error(lengths: Any) -> None:
    with pytest.raises(TypeError, match="lengths must be plain integers") as caught:
        RealPositions.from_lengths(lengths, 2, 6)
    assert isinstance(caught.value, LengthTypeError)


@pytest.mark.parametrize(
    "lengths", [[5, 4], torch.tensor([5, 4], dtype=torch.int32), np.array([5, 4]), (np.int64(5), 4)], ids=repr
)
def test_integers_of_every_kind_are_lengths(lengths: Any) -> None:
    assert RealPositions.from_lengths(lengths, 2, 6).lengths == (5, 4)


def test_a_hole_that_generation_leaves_behind_a_right_padded_prompt_points_to_the_left() -> None:
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1]])
    with pytest.raises(PositionsError, match=r"has a hole.* use padding_side='left' in generate\(\)"):
        RealPositions.from_attention_mask(mask, 2, 1, Held(3))
    with pytest.raises(PositionsError) as caught:
        RealPositions.from_attention_mask(mask, 2, 4)
    assert "padding_side" not in str(caught.value)


def test_a_hole_is_refused_even_with_lengths_beside_it() -> None:
    mask = torch.tensor([[1, 0, 1]])
    with pytest.raises(PositionsError, match="row 0 of attention_mask has a hole"):
        real_positions(None, 1, 3, lengths=[3], attention_mask=mask)


def test_a_row_without_a_real_position_is_refused() -> None:
    with pytest.raises(PositionsError, match="row 1 of attention_mask has no real position"):
        RealPositions.from_attention_mask(torch.tensor([[1, 1], [0, 0]]), 2, 2)


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ([3], "expected one length for each of the 2 rows"),
        ([3, 0], "length of row 1 is 0"),
        ([6, 2], "length of row 0 is 6"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(lengths: list[int], text: str) -> None:
    with pytest.raises(PositionsError, match=text):
        RealPositions.from_lengths(lengths, 2, 5)


def test_without_lengths_and_mask_every_position_is_real_even_one_that_holds_a_shared_pad_id() -> None:
    config = LlamaConfig(vocab_size=32, pad_token_id=2, eos_token_id=2, bos_token_id=1)
    assert lone_pad_id(config) is None
    ids = torch.tensor([[1, 5, 2], [1, 2, 2]])
    assert real_positions(ids, 2, 3, lone_pad_id=lone_pad_id(config)).lengths == (3, 3)


def test_a_pad_id_with_no_other_role_at_an_edge_asks_for_a_mask() -> None:
    config = LlamaConfig(vocab_size=32, pad_token_id=0, eos_token_id=[2, 3], bos_token_id=1)
    assert lone_pad_id(config) == 0
    with pytest.raises(PositionsError, match="row 1 begins or ends with the pad id 0"):
        real_positions(torch.tensor([[1, 5, 2], [1, 2, 0]]), 2, 3, lone_pad_id=0)
    with pytest.raises(PositionsError, match="row 0 begins or ends with the pad id 0"):
        real_positions(torch.tensor([[0, 5, 2]]), 1, 3, lone_pad_id=0)


def test_lengths_and_a_mask_that_disagree_are_refused() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    with pytest.raises(PositionsError, match=r"lengths \[2, 4\] and attention_mask disagree"):
        real_positions(None, 2, 4, lengths=[2, 4], attention_mask=mask)
    assert real_positions(None, 2, 4, lengths=[2, 4], attention_mask=torch.ones(2, 4)).lengths == (2, 4)


def test_a_pad_id_inside_a_row_is_a_token_like_any_other() -> None:
    assert real_positions(torch.tensor([[1, 0, 2]]), 1, 3, lone_pad_id=0).lengths == (3,)


def test_a_mask_of_another_form_needs_lengths() -> None:
    with pytest.raises(PositionsError, match="give lengths= as well"):
        real_positions(None, 1, 3, attention_mask=torch.ones(1, 1, 3, 3))
    assert real_positions(None, 1, 3, attention_mask=torch.ones(1, 1, 3, 3), lengths=[2]).lengths == (2,)
