"""Auxiliary outputs between pipeline stages: keys, exact errors, composites."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from hiddentap.capture.outputs import (
    CompositeDeviceAuxiliaryOutput,
    PipelineParallelAuxiliaryOutput,
    PipelineParallelSamplingObserver,
    add_auxiliary_output_to_pp_tensors,
    append_auxiliary_output,
    pipeline_observer,
    pop_auxiliary_output_from_pp_tensors,
)

PREFIX = "__sampling_observer_output__."


class Output:
    """A device output that sends what it was given."""

    def __init__(self, tensors: Mapping[Any, Any]) -> None:
        self.tensors = tensors

    def copy_to_host(self, copy_tensor: Callable[[Tensor], Tensor]) -> Any:
        raise NotImplementedError

    def to_pp_tensors(self) -> Mapping[Any, Any]:
        return self.tensors


class LocalOutput:
    """A device output that cannot be sent."""

    def copy_to_host(self, copy_tensor: Callable[[Tensor], Tensor]) -> Any:
        raise NotImplementedError


class Observer:
    def __init__(self) -> None:
        self.received: list[dict[str, Tensor]] = []

    def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> Output:
        self.received.append(dict(tensors))
        return Output(dict(tensors))


class SilentObserver:
    def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        return None


def test_protocols_can_be_checked_at_run_time() -> None:
    assert isinstance(Output({}), PipelineParallelAuxiliaryOutput)
    assert not isinstance(LocalOutput(), PipelineParallelAuxiliaryOutput)
    assert isinstance(Observer(), PipelineParallelSamplingObserver)
    assert not isinstance(object(), PipelineParallelSamplingObserver)


def test_adding_puts_each_tensor_under_the_prefix_and_leaves_the_rest() -> None:
    hidden, ids, probabilities = torch.zeros(2), torch.tensor([1]), torch.tensor([0.5])
    tensors: dict[str, Any] = {"hidden_states": hidden}
    add_auxiliary_output_to_pp_tensors(tensors, Output({"token_ids": ids, "logprobs": probabilities}))
    assert list(tensors) == ["hidden_states", PREFIX + "token_ids", PREFIX + "logprobs"]
    assert tensors["hidden_states"] is hidden
    assert tensors[PREFIX + "token_ids"] is ids
    assert tensors[PREFIX + "logprobs"] is probabilities


def test_adding_nothing_leaves_the_dict_alone() -> None:
    tensors: dict[str, Any] = {"hidden_states": 1}
    add_auxiliary_output_to_pp_tensors(tensors, None)
    assert tensors == {"hidden_states": 1}


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (LocalOutput(), "auxiliary output does not support pipeline-parallel transport"),
        (Output({}), "auxiliary PP output must contain at least one tensor"),
        (Output({"": torch.zeros(1)}), "auxiliary PP tensor names must be non-empty strings"),
        (Output({3: torch.zeros(1)}), "auxiliary PP tensor names must be non-empty strings"),
        (Output({"good": torch.zeros(1), None: torch.zeros(1)}), "auxiliary PP tensor names must be non-empty strings"),
        (Output({"ids": [1]}), "auxiliary PP output 'ids' is not a tensor"),
        (Output({"good": torch.zeros(1), "ids": None}), "auxiliary PP output 'ids' is not a tensor"),
        (Output({"good": torch.zeros(1), "taken": torch.zeros(1)}), "duplicate auxiliary PP tensor 'taken'"),
    ],
)
def test_what_cannot_be_added_is_refused_and_the_dict_is_as_before(output: Any, text: str) -> None:
    tensors: dict[str, Any] = {"a": 1, PREFIX + "taken": 2, "b": 3}
    with pytest.raises(RuntimeError) as caught:
        add_auxiliary_output_to_pp_tensors(tensors, output)
    assert str(caught.value).startswith(text)
    assert list(tensors.items()) == [("a", 1), (PREFIX + "taken", 2), ("b", 3)]


def test_an_error_inside_the_output_leaves_the_dict_as_before() -> None:
    class Failing(Output):
        def to_pp_tensors(self) -> Mapping[Any, Any]:
            raise KeyError("inside")

    tensors: dict[str, Any] = {"a": 1}
    with pytest.raises(KeyError, match="inside"):
        add_auxiliary_output_to_pp_tensors(tensors, Failing({}))
    assert tensors == {"a": 1}


def test_popping_gives_the_observer_the_names_without_prefix_and_removes_only_their_keys() -> None:
    ids, observer = torch.tensor([1, 2]), Observer()
    tensors: dict[str, Any] = {"z": 1, PREFIX + "token_ids": ids, "a": 2, PREFIX + "x.y": torch.zeros(1), "m": 3}
    output = pop_auxiliary_output_from_pp_tensors(tensors, observer)
    assert isinstance(output, Output)
    assert list(observer.received[0]) == ["token_ids", "x.y"]
    assert observer.received[0]["token_ids"] is ids
    assert list(tensors.items()) == [("z", 1), ("a", 2), ("m", 3)]


def test_popping_without_a_prefixed_key_gives_none_and_leaves_the_observer_alone() -> None:
    observer = Observer()
    tensors: dict[str, Any] = {"hidden_states": 1, "x" + PREFIX + "ids": 2}
    assert pop_auxiliary_output_from_pp_tensors(tensors, observer) is None
    assert pop_auxiliary_output_from_pp_tensors(tensors, None) is None
    assert observer.received == []
    assert tensors == {"hidden_states": 1, "x" + PREFIX + "ids": 2}


@pytest.mark.parametrize(
    ("value", "observer", "text"),
    [
        (torch.zeros(1), None, "received auxiliary PP output without a sampling observer"),
        (torch.zeros(1), object(), "sampling observer does not support pipeline-parallel transport"),
        ("ids", Observer(), "received a non-tensor auxiliary PP output"),
        (torch.zeros(1), SilentObserver(), "sampling observer did not reconstruct its PP output"),
        ("ids", None, "received auxiliary PP output without a sampling observer"),
        ("ids", object(), "sampling observer does not support pipeline-parallel transport"),
        ("ids", SilentObserver(), "received a non-tensor auxiliary PP output"),
    ],
)
def test_what_cannot_be_popped_is_refused_in_the_documented_order_and_nothing_is_removed(
    value: Any, observer: Any, text: str
) -> None:
    tensors: dict[str, Any] = {"a": 1, PREFIX + "good": torch.zeros(1), PREFIX + "ids": value, "b": 2}
    before = list(tensors.items())
    with pytest.raises(RuntimeError) as caught:
        pop_auxiliary_output_from_pp_tensors(tensors, observer)
    assert str(caught.value).startswith(text)
    assert [key for key, _ in before] == list(tensors)
    assert all(tensors[key] is kept for key, kept in before)


def test_a_non_tensor_is_found_before_the_observer_is_called() -> None:
    observer = Observer()
    with pytest.raises(RuntimeError, match=r"^received a non-tensor auxiliary PP output"):
        pop_auxiliary_output_from_pp_tensors({PREFIX + "ids": 3}, observer)
    assert observer.received == []


def test_an_error_inside_the_observer_leaves_every_key() -> None:
    class Failing:
        def from_pp_tensors(self, tensors: Mapping[str, Tensor]) -> Any:
            raise KeyError("inside")

    tensors: dict[str, Any] = {PREFIX + "ids": torch.zeros(1)}
    with pytest.raises(KeyError, match="inside"):
        pop_auxiliary_output_from_pp_tensors(tensors, Failing())
    assert list(tensors) == [PREFIX + "ids"]


def test_a_composite_crosses_the_pipeline_in_order_with_equal_names_and_dtypes_kept() -> None:
    sent = append_auxiliary_output(
        append_auxiliary_output(
            Output({"token_ids": torch.tensor([1, 2], dtype=torch.int32), "a.b": torch.ones(1)}),
            Output({"token_ids": torch.tensor([0.5], dtype=torch.bfloat16)}),
        ),
        Output({"token_ids": torch.tensor([[9]], dtype=torch.int64)}),
    )
    tensors: dict[str, Any] = {"hidden_states": 1}
    add_auxiliary_output_to_pp_tensors(tensors, sent)
    passed_on = dict(reversed(tensors.items()))  # middle ranks may not keep the order of keys

    observers = [Observer(), Observer(), Observer()]
    output = pop_auxiliary_output_from_pp_tensors(passed_on, pipeline_observer(observers))
    assert isinstance(output, CompositeDeviceAuxiliaryOutput)
    first, second, third = (child.to_pp_tensors() for child in output.outputs)  # type: ignore[attr-defined]
    assert torch.equal(first["token_ids"], torch.tensor([1, 2], dtype=torch.int32))
    assert torch.equal(first["a.b"], torch.ones(1))
    assert second["token_ids"].dtype == torch.bfloat16
    assert second["token_ids"].tolist() == [0.5]
    assert torch.equal(third["token_ids"], torch.tensor([[9]], dtype=torch.int64))
    assert passed_on == {"hidden_states": 1}


def test_more_than_ten_children_stay_in_order() -> None:
    sent = CompositeDeviceAuxiliaryOutput(tuple(Output({"x": torch.tensor(index)}) for index in range(12)))
    tensors: dict[str, Any] = {}
    add_auxiliary_output_to_pp_tensors(tensors, sent)
    output = pop_auxiliary_output_from_pp_tensors(tensors, pipeline_observer([Observer() for _ in range(12)]))
    assert isinstance(output, CompositeDeviceAuxiliaryOutput)
    assert [child.to_pp_tensors()["x"].item() for child in output.outputs] == list(range(12))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("child", "text"),
    [
        (LocalOutput(), "auxiliary output does not support pipeline-parallel transport"),
        (Output({}), "auxiliary PP output must contain at least one tensor"),
        (Output({"": torch.zeros(1)}), "auxiliary PP tensor names must be non-empty strings"),
        (Output({"ids": 1}), "auxiliary PP output 'ids' is not a tensor"),
    ],
)
def test_a_child_that_cannot_be_sent_is_refused_like_a_whole_output(child: Any, text: str) -> None:
    tensors: dict[str, Any] = {"a": 1}
    with pytest.raises(RuntimeError) as caught:
        add_auxiliary_output_to_pp_tensors(
            tensors, CompositeDeviceAuxiliaryOutput((Output({"x": torch.zeros(1)}), child))
        )
    assert str(caught.value).startswith(text)
    assert tensors == {"a": 1}


def test_an_empty_composite_sends_nothing_and_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"^auxiliary PP output must contain at least one tensor"):
        add_auxiliary_output_to_pp_tensors({}, CompositeDeviceAuxiliaryOutput(()))


@pytest.mark.parametrize("count", [2, 4])
def test_a_composite_with_another_number_of_children_than_observers_is_refused(count: int) -> None:
    sent = CompositeDeviceAuxiliaryOutput(tuple(Output({"x": torch.zeros(1)}) for _ in range(3)))
    tensors: dict[str, Any] = {}
    add_auxiliary_output_to_pp_tensors(tensors, sent)
    with pytest.raises(RuntimeError, match=rf"outputs \['0', '1', '2'\] for {count} sampling observers"):
        pop_auxiliary_output_from_pp_tensors(tensors, pipeline_observer([Observer() for _ in range(count)]))
    assert len(tensors) == 3


@pytest.mark.parametrize(
    ("second", "text"),
    [
        (SilentObserver(), "sampling observer did not reconstruct its PP output"),
        (object(), "sampling observer does not support pipeline-parallel transport"),
    ],
)
def test_an_observer_of_a_group_that_fails_gives_the_same_text_as_a_single_one(second: Any, text: str) -> None:
    sent = CompositeDeviceAuxiliaryOutput((Output({"x": torch.zeros(1)}), Output({"x": torch.zeros(1)})))
    tensors: dict[str, Any] = {}
    add_auxiliary_output_to_pp_tensors(tensors, sent)
    with pytest.raises(RuntimeError) as caught:
        pop_auxiliary_output_from_pp_tensors(tensors, pipeline_observer([Observer(), second]))
    assert str(caught.value).startswith(text)
    assert len(tensors) == 2


def test_one_observer_stands_for_itself_and_none_for_none() -> None:
    observer = Observer()
    assert pipeline_observer([observer]) is observer
    assert pipeline_observer([]) is None
