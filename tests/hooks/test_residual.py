"""The residual stream read from a layer's output, by rule and never by guess."""

import pytest
import torch

from hiddentap.hooks import TapError
from hiddentap.hooks.residual import read_input, read_output

STATE = torch.arange(24.0).reshape(2, 3, 4)


def test_a_bare_tensor_is_the_state_and_no_row_of_it() -> None:
    assert read_output(STATE, "layer 0") is STATE


def test_the_first_item_of_a_tuple_is_the_state() -> None:
    attention = torch.ones(2, 4, 3, 3)
    assert read_output((STATE, attention, None), "layer 0") is STATE
    assert read_output([STATE], "layer 0") is STATE


def test_a_second_item_that_looks_like_a_state_is_refused() -> None:
    with pytest.raises(
        TapError, match=r"layer 0 returned tuple\(.*\): item 1 looks just like the hidden state.*adapter"
    ):
        read_output((STATE, torch.zeros_like(STATE)), "layer 0")


def test_an_integer_item_of_the_same_shape_is_no_state() -> None:
    assert read_output((STATE, torch.zeros(2, 3, 4, dtype=torch.int64)), "layer 0") is STATE


@pytest.mark.parametrize("output", [None, (), (None, STATE), "x"])
def test_an_output_without_a_tensor_first_is_refused(output: object) -> None:
    with pytest.raises(TapError, match="layer 0 returned"):
        read_output(output, "layer 0")


def test_the_input_is_the_first_argument_or_hidden_states_by_name() -> None:
    assert read_input((STATE, None), {}, "layer 0") is STATE
    assert read_input((), {"hidden_states": STATE}, "layer 0") is STATE
    with pytest.raises(TapError, match="layer 0 was called with None"):
        read_input((), {}, "layer 0")
