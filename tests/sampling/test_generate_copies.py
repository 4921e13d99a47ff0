"""One copy of every tensor of a step, holders let go, and right values however a layer treats its memory."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from hiddentap.capture.outputs import host_copy
from hiddentap.capture.sampling import DeviceSampledRows, SamplingParams, generate_with_capture
from support import tiny
from support.generation import LAYER_IDS, PROMPTS, CountedCalls, PlainForward, lively, row_error

COUNT = 6
PARAMS = SamplingParams(
    seed=1, max_new_tokens=COUNT, ignore_eos=True, return_sampling_mask=True, return_logprob=True, top_logits=3
)
# Of each step: hidden states; tokens and whether they have weight; masks 5; log-probabilities 1; top logits 4.
COLUMNS_OF_A_STEP = 1 + 2 + 5 + 1 + 4


class CopyRecord:
    """Notes every tensor that is copied, by weak reference, and how many earlier ones are alive then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []
        copy = host_copy._copied_before_return
        monkeypatch.setattr(host_copy, "_copied_before_return", lambda tensor: self._note(tensor, copy))

    def _note(self, tensor: Tensor, copy: Callable[[Tensor], Tensor]) -> Tensor:
        self.alive.append(sum(one() is not None for one in self.seen))
        assert not any(one() is tensor for one in self.seen)
        self.seen.append(weakref.ref(tensor))
        return copy(tensor)


@pytest.mark.parametrize("lookup", [0, 2])
def test_each_tensor_of_a_step_is_copied_once_for_the_whole_batch(monkeypatch: pytest.MonkeyPatch, lookup: int) -> None:
    record = CopyRecord(monkeypatch)
    with CountedCalls(lively("llama")) as calls:
        generate_with_capture(lively("llama"), PROMPTS, PARAMS, layer_ids=LAYER_IDS, final="none", prompt_lookup=lookup)
    first = next(i for i, shape in enumerate(calls.shapes) if shape in [(2, 7), (1, 20)] and i > 8)
    steps = len(calls.shapes[first:])
    assert len(record.seen) == steps * COLUMNS_OF_A_STEP


def test_what_an_earlier_step_made_is_gone_when_the_next_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    record = CopyRecord(monkeypatch)
    generate_with_capture(lively("llama"), PROMPTS[:1], PARAMS, layer_ids=LAYER_IDS, final="none")
    # Within a step the tensors copied before are waiting; of the steps before none is left.
    assert record.alive == list(range(COLUMNS_OF_A_STEP)) * COUNT
    gc.collect()
    assert all(one() is None for one in record.seen)


class CountingRows(DeviceSampledRows):
    """Counts its copies."""

    copies: list[int]

    def copy_to_host(self, copy_tensor: Any) -> Any:
        self.copies.append(1)
        return super().copy_to_host(copy_tensor)


class CountingObserver:
    def __init__(self) -> None:
        self.copies: list[int] = []
        self.made: list[weakref.ref[Any]] = []

    def is_active(self, sampling_info: Any) -> bool:
        return True

    def before_grammar(self, logits: Tensor, sampling_info: Any) -> Any:
        return sampling_info

    def after_sample(self, state: Any, token_ids: Tensor) -> Any:
        assert all(one() is None for one in self.made)
        rows = CountingRows({"twice": token_ids * 2}, state.layout)
        rows.copies = self.copies
        self.made.append(weakref.ref(rows))
        return rows


def test_each_child_is_copied_once_per_step_and_let_go() -> None:
    observer = CountingObserver()
    [result] = generate_with_capture(lively("llama"), PROMPTS[:1], PARAMS, layer_ids=LAYER_IDS, observers=[observer])
    assert len(observer.copies) == len(observer.made) == COUNT
    gc.collect()
    assert all(one() is None for one in observer.made)
    assert result.observed["twice"].tolist() == [2 * token for token in result.token_ids]


def test_results_share_no_memory_with_each_other_or_with_a_batch() -> None:
    results = generate_with_capture(lively("llama"), PROMPTS[:4], PARAMS, layer_ids=LAYER_IDS)
    states = [result.aux_hidden_states for result in results]
    assert len({state.untyped_storage().data_ptr() for state in states}) == 4
    assert [state.untyped_storage().nbytes() for state in states] == [state.numel() * 4 for state in states]
    assert not any(state.is_inference() for state in states)


class ReusingLayer(LlamaDecoderLayer):
    """Writes every output into the same memory."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        output = super().forward(*args, **kwargs)
        if not hasattr(self, "memory"):
            self.memory = torch.empty(100_000)
        shared = self.memory[: output.numel()].view(output.shape)
        return shared.copy_(output)


class OverwritingLayer(LlamaDecoderLayer):
    """Adds to its input in place when it has used it."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output = super().forward(hidden_states, *args, **kwargs).clone()
        hidden_states.add_(1000.0)
        return output


@pytest.mark.parametrize("kind", [ReusingLayer, OverwritingLayer])
@pytest.mark.parametrize("lookup", [0, 3])
def test_values_are_right_where_a_layer_uses_its_memory_again(kind: type[LlamaDecoderLayer], lookup: int) -> None:
    usual, model = tiny.build("llama", seed=3), tiny.build("llama", seed=3)
    for layer in model.model.layers:
        layer.__class__ = kind
    params = SamplingParams(seed=1, max_new_tokens=8, ignore_eos=True)
    for result in generate_with_capture(model, PROMPTS, params, layer_ids=LAYER_IDS, prompt_lookup=lookup):
        plain = PlainForward(usual, result.input_ids.tolist())
        assert row_error(result.aux_hidden_states, plain.layers(LAYER_IDS)) < 1e-5
