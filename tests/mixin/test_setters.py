"""The setters of the mixin: each documented error, on a subclass and on a converted model."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from hiddentap.capture.mixin import HiddenStateCaptureMixin, with_capture
from hiddentap.models.pipeline import PipelineGroup
from support import tiny


class CapturingLlama(HiddenStateCaptureMixin, LlamaForCausalLM):
    """The way of subclassing."""


def subclassed(n: int = 4) -> nn.Module:
    return CapturingLlama(tiny.llama_config(num_hidden_layers=n)).eval()


def converted(n: int = 4) -> nn.Module:
    return with_capture(tiny.build_llama(num_hidden_layers=n))


WAYS = pytest.mark.parametrize("make", [subclassed, converted], ids=["subclassed", "with_capture"])
SETTERS = pytest.mark.parametrize("name", ["DSPARK", "DFLASH", "EAGLE3"])


def setter(model: nn.Module, name: str):
    return getattr(model, f"set_{name.lower()}_layers_to_capture")


@dataclass
class FakeGroup:
    """A plain group object of somebody else's, with just what is asked of it."""

    world_size: int
    is_last_rank: bool


@WAYS
@SETTERS
@pytest.mark.parametrize("layer_ids", [None, [1], [9, 9]])
def test_more_than_one_stage_is_refused_before_anything_else(make, name: str, layer_ids: object) -> None:
    model = make()
    model.pp_group = FakeGroup(world_size=2, is_last_rank=True)
    with pytest.raises(NotImplementedError) as caught:
        setter(model, name)(layer_ids)
    assert str(caught.value) == f"{name} aux hidden capture requires PP=1."
    assert not model.capture_aux_hidden_states


@WAYS
def test_a_group_of_one_that_says_it_is_not_last_sets_nothing(make) -> None:
    model = make()
    model.pp_group = FakeGroup(world_size=1, is_last_rank=False)
    model.set_dspark_layers_to_capture(None)
    model.set_dspark_layers_to_capture(["nonsense"])
    assert (model.capture_aux_hidden_states, model.layers_to_capture) == (False, [])


BAD = [
    (None, ValueError, "{} requires explicit layer_ids for aux hidden capture."),
    ([], ValueError, "{} requires at least one target layer for aux hidden capture."),
    ([True], TypeError, "{} target layer_ids must be plain integers; got True (bool)."),
    ([1.0], TypeError, "{} target layer_ids must be plain integers; got 1.0 (float)."),
    ("1", TypeError, "{} target layer_ids must be a list of plain integers; got '1'."),
    ([1, 1], ValueError, "{} target layer_ids must be unique and strictly increasing."),
    ([2, 1], ValueError, "{} target layer_ids must be unique and strictly increasing."),
    ([-1], ValueError, "{} target layer_ids are outside the decoder range: [-1]; num_hidden_layers=4."),
    ([0, 4], ValueError, "{} target layer_ids are outside the decoder range: [4]; num_hidden_layers=4."),
]


@WAYS
@SETTERS
@pytest.mark.parametrize(("layer_ids", "error", "text"), BAD, ids=[repr(b[0]) for b in BAD])
def test_each_bad_list_gives_its_text_and_sets_nothing(make, name: str, layer_ids, error, text: str) -> None:
    model = make()
    if name == "EAGLE3" and layer_ids is None:
        text = "{} default layers need num_hidden_layers >= 7; got 4."
    with pytest.raises(error) as caught:
        setter(model, name)(layer_ids)
    assert str(caught.value).startswith(text.format(name))
    assert (model.capture_aux_hidden_states, model.layers_to_capture) == (False, [])


@WAYS
def test_eagle3_without_ids_takes_its_three_default_layers(make) -> None:
    model = make(12)
    model.set_eagle3_layers_to_capture(None)
    assert model.layers_to_capture == [1, 5, 8]


@WAYS
def test_a_copy_of_the_list_is_kept(make) -> None:
    model, ids = make(), [0, 2]
    model.set_dspark_layers_to_capture(ids)
    ids.append(3)
    assert (model.capture_aux_hidden_states, model.layers_to_capture) == (True, [0, 2])


@WAYS
def test_set_again_the_old_taps_go_and_the_new_ones_hold(make) -> None:
    model, ids = make(), tiny.token_ids(1, 4)
    model.set_dspark_layers_to_capture([0, 2])
    first = model(ids).aux_hidden_states
    model.set_dflash_layers_to_capture([2, 3])
    second = model(ids).aux_hidden_states
    assert (len(first), len(second), model.layers_to_capture) == (2, 2, [2, 3])
    assert torch.equal(second[0], first[1])
    assert sum(len(layer._forward_hooks) for layer in model.model.layers) == 2


@WAYS
def test_a_refused_list_leaves_the_earlier_taps_in_place(make) -> None:
    model = make()
    model.set_dspark_layers_to_capture([0, 2])
    with pytest.raises(ValueError, match="strictly increasing"):
        model.set_dspark_layers_to_capture([2, 2])
    assert model.layers_to_capture == [0, 2]


def test_a_group_object_with_one_stage_is_accepted() -> None:
    model = converted()
    model.pp_group = PipelineGroup(world_size=1)
    model.set_dspark_layers_to_capture([1])
    assert model.capture_aux_hidden_states
