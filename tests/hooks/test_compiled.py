"""Taps on compiled models: right or refused, never a silent miss, and no recompilation from call to call."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from hiddentap.hooks import TapError, tap
from support import tiny
from support.compiled import BY_LAYER, WHOLE, Small, graphs, start_afresh, states_of_small

IDS = [tiny.token_ids(1, 6, seed=seed) for seed in range(4)]


@pytest.fixture(scope="module")
def hidden_states() -> list[list[torch.Tensor]]:
    return [states_of_small(ids) for ids in IDS]


@pytest.fixture(autouse=True)
def no_graphs() -> Iterator[None]:
    start_afresh()
    yield
    start_afresh()


@torch.no_grad()
def tapped_calls(model: nn.Module, hidden_states: list[list[torch.Tensor]], stop_early: bool | None) -> list[int]:
    """Run all batches under taps, compare, and say how many graphs there were after each."""
    counts = []
    with tap(model, [0, 2], stop_early=stop_early) as t:
        for ids, hs in zip(IDS, hidden_states, strict=True):
            states = t.run(ids).aux_hidden_states
            assert torch.equal(states[0], hs[1])
            assert torch.equal(states[1], hs[3])
            counts.append(graphs())
    return counts


@pytest.mark.parametrize("stop_early", [None, False], ids=["stopped", "whole"])
@pytest.mark.parametrize("way", WHOLE)
def test_a_whole_model_compiled_before_its_first_call_is_right_and_attaching_again_is_too(
    way: str, stop_early: bool | None, hidden_states
) -> None:
    model = WHOLE[way](Small())
    first = tapped_calls(model, hidden_states, stop_early)
    again = tapped_calls(model, hidden_states, stop_early)
    assert first[0] > 0
    assert set(first[1:] + again) == {first[0]}


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("way", BY_LAYER)
def test_layers_compiled_one_by_one_are_right_however_often_taps_come_and_go(
    way: str, warm: bool, hidden_states
) -> None:
    model = BY_LAYER[way](Small())
    if warm:
        with torch.no_grad():
            model(IDS[0])
    counts = tapped_calls(model, hidden_states, None) + tapped_calls(model, hidden_states, False)
    assert set(counts[1:]) == {1}, "one graph serves all layers and all calls"


@pytest.mark.parametrize("way", WHOLE)
def test_taps_that_come_after_a_compiled_call_are_refused_and_say_what_to_do(way: str, hidden_states) -> None:
    model = WHOLE[way](Small())
    with torch.no_grad():
        model(IDS[0])
        for _ in range(2):
            with (
                tap(model, [0, 2]) as t,
                pytest.raises(TapError, match=r"boundary 1, boundary 3 .* did not fire.*torch\._dynamo\.reset\(\)"),
            ):
                t.run(IDS[1])
    torch._dynamo.reset()
    tapped_calls(model, hidden_states, None)


def test_the_check_on_attaching_leaves_no_graph() -> None:
    model = WHOLE["model.compile()"](Small())
    with tap(model, [0, 2], final="both"):
        assert graphs() == 0


def test_a_forced_eager_stance_makes_late_taps_fire(hidden_states) -> None:
    model = WHOLE["model.compile()"](Small())
    with torch.no_grad():
        model(IDS[0])
    with torch.compiler.set_stance("force_eager"):
        tapped_calls(model, hidden_states, None)


def test_norm_states_of_a_compiled_model_are_right(hidden_states) -> None:
    model = WHOLE["model.compile()"](Small())
    with torch.no_grad(), tap(model, [1], final="both") as t:
        for ids, hs in zip(IDS, hidden_states, strict=True):
            captured = t.run(ids)
            assert torch.equal(captured.pre_norm, hs[4])
            assert torch.equal(captured.post_norm, hs[5])


def test_a_graph_that_may_not_break_says_why_it_must() -> None:
    model = Small()
    model.compile(backend="eager", fullgraph=True)
    with (
        torch.no_grad(),
        tap(model, [1]) as t,
        pytest.raises(torch._dynamo.exc.Unsupported, match="hiddentap copies a state here; compile without fullgraph"),
    ):
        t.run(IDS[0])


@pytest.mark.slow
def test_a_compiled_llama_gives_the_states_of_its_eager_self() -> None:
    with torch.no_grad():
        hs = tiny.build("llama")(IDS[0], output_hidden_states=True, use_cache=False).hidden_states
        with tap(WHOLE["torch.compile(model)"](tiny.build("llama")), [0, 2]) as t:
            states = t.run(IDS[0]).aux_hidden_states
    assert torch.equal(states[0], hs[1])
    assert torch.equal(states[1], hs[3])
