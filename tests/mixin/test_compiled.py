"""Mixin models that are compiled: right or refused, nothing of the first call's checks in a graph, no recompilation."""

from collections.abc import Iterator

import pytest
import torch

from hiddentap.capture.mixin import with_capture
from hiddentap.hooks import TapError
from support import tiny
from support.compiled import BY_LAYER, WHOLE, Small, graphs, in_a_function, start_afresh, states_of_small

IDS = [tiny.token_ids(1, 6, seed=seed) for seed in range(4)]
WAYS = WHOLE | BY_LAYER | {"torch.compile(function)": in_a_function}


@pytest.fixture(scope="module")
def hidden_states() -> list[list[torch.Tensor]]:
    return [states_of_small(ids) for ids in IDS]


@pytest.fixture(autouse=True)
def no_graphs() -> Iterator[None]:
    start_afresh()
    yield
    start_afresh()


@torch.no_grad()
def captured_calls(compiled, hidden_states) -> list[int]:
    counts = []
    for ids, hs in zip(IDS, hidden_states, strict=True):
        states = compiled(ids).aux_hidden_states
        assert torch.equal(states[0], hs[1])
        assert torch.equal(states[1], hs[3])
        counts.append(graphs())
    return counts


@pytest.mark.parametrize("way", WAYS)
def test_captured_calls_are_right_without_a_graph_for_each(way: str, hidden_states) -> None:
    model = with_capture(Small())
    compiled = WAYS[way](model)
    model.set_dspark_layers_to_capture([0, 2])
    first = captured_calls(compiled, hidden_states)
    assert first[0] == 0, "the first captured call is watched, and runs without graphs"
    assert len(set(first[1:])) == 1
    model.clear_layers_to_capture()
    with torch.no_grad():
        assert not hasattr(compiled(IDS[0]), "aux_hidden_states")
    model.set_dspark_layers_to_capture([0, 2])
    again = captured_calls(compiled, hidden_states)
    assert len(set(again[1:])) == 1


@pytest.mark.parametrize("way", WAYS)
def test_capture_that_begins_after_a_compiled_call_is_right_or_refused(way: str, hidden_states) -> None:
    model = with_capture(Small())
    compiled = WAYS[way](model)
    with torch.no_grad():
        compiled(IDS[0])
    model.set_dspark_layers_to_capture([0, 2])
    if way == "model.compile()":
        with torch.no_grad(), pytest.raises(TapError, match=r"boundary 1, boundary 3 .* did not fire in this forward"):
            captured_calls(compiled, hidden_states)
        return
    captured_calls(compiled, hidden_states)
