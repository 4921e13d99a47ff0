"""Several auxiliary outputs as one."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hiddentap.capture.outputs import (
    CommittedTokens,
    CompositeDeviceAuxiliaryOutput,
    CompositeHostAuxiliaryOutput,
    DeviceAuxiliaryOutput,
    HostAuxiliaryOutput,
    append_auxiliary_output,
)
from support.fake_requests import FakeBatch, FakeRequest


class FakeHost:
    def __init__(self, name: str, log: list[tuple[object, ...]], error: BaseException | None = None) -> None:
        self.name, self.log, self.error = name, log, error

    def consume(self, batch: object, commits: object) -> None:
        self.log.append((self.name, batch, commits))
        if self.error is not None:
            raise self.error


class FakeDevice:
    def __init__(self, name: str, *tensors: Tensor) -> None:
        self.name, self.tensors = name, tensors
        self.host = FakeHost(name, [])

    def copy_to_host(self, copy_tensor: Callable[[Tensor], Tensor]) -> FakeHost:
        for tensor in self.tensors:
            copy_tensor(tensor)
        return self.host


def test_a_composite_copies_its_children_in_order_each_tensor_once() -> None:
    copied: list[float] = []

    def copy_tensor(tensor: Tensor) -> Tensor:
        copied.append(tensor.item())
        return tensor

    first = FakeDevice("a", torch.tensor(1.0), torch.tensor(2.0))
    second = FakeDevice("b", torch.tensor(3.0))
    host = CompositeDeviceAuxiliaryOutput((first, second)).copy_to_host(copy_tensor)
    assert copied == [1.0, 2.0, 3.0]
    assert type(host) is CompositeHostAuxiliaryOutput
    assert host.outputs == (first.host, second.host)


def test_every_child_consumes_the_same_batch_and_commits_in_order() -> None:
    log: list[tuple[object, ...]] = []
    batch, commits = FakeBatch([FakeRequest()]), [CommittedTokens(0, (1,))]
    CompositeHostAuxiliaryOutput((FakeHost("a", log), FakeHost("b", log))).consume(batch, commits)
    assert [entry[0] for entry in log] == ["a", "b"]
    assert all(entry[1] is batch and entry[2] is commits for entry in log)


def test_a_child_that_raises_keeps_no_other_child_from_its_call() -> None:
    log: list[tuple[object, ...]] = []
    broken, late = KeyError("first"), ValueError("third")
    host = CompositeHostAuxiliaryOutput((FakeHost("a", log, broken), FakeHost("b", log), FakeHost("c", log, late)))
    with pytest.raises(ExceptionGroup) as caught:
        host.consume(FakeBatch([]), [])
    assert [entry[0] for entry in log] == ["a", "b", "c"]
    assert caught.value.exceptions == (broken, late)


def test_a_single_error_is_raised_as_a_group_too() -> None:
    error = ValueError("only")
    with pytest.raises(ExceptionGroup) as caught:
        CompositeHostAuxiliaryOutput((FakeHost("a", [], error), FakeHost("b", []))).consume(FakeBatch([]), [])
    assert caught.value.exceptions == (error,)


def test_an_interrupt_is_not_held_back_by_the_other_children() -> None:
    log: list[tuple[object, ...]] = []
    host = CompositeHostAuxiliaryOutput((FakeHost("a", log, KeyboardInterrupt()), FakeHost("b", log)))
    with pytest.raises(KeyboardInterrupt):
        host.consume(FakeBatch([]), [])
    assert [entry[0] for entry in log] == ["a"]


@pytest.mark.parametrize("kind", [CompositeDeviceAuxiliaryOutput, CompositeHostAuxiliaryOutput])
def test_composites_are_frozen(kind: type) -> None:
    composite = kind(())
    with pytest.raises(dataclasses.FrozenInstanceError):
        composite.outputs = (1,)


def test_composites_keep_the_contract_that_they_compose() -> None:
    assert isinstance(CompositeDeviceAuxiliaryOutput(()), DeviceAuxiliaryOutput)
    assert isinstance(CompositeHostAuxiliaryOutput(()), HostAuxiliaryOutput)
    assert not isinstance(CompositeHostAuxiliaryOutput(()), DeviceAuxiliaryOutput)


def test_appending_to_nothing_or_nothing_returns_the_same_object() -> None:
    output = FakeDevice("a")
    assert append_auxiliary_output(None, output) is output
    assert append_auxiliary_output(output, None) is output
    assert append_auxiliary_output(None, None) is None


def test_appending_none_to_a_composite_returns_that_composite() -> None:
    composite = CompositeDeviceAuxiliaryOutput((FakeDevice("a"), FakeDevice("b")))
    assert append_auxiliary_output(composite, None) is composite
    assert append_auxiliary_output(None, composite) is composite


def test_appending_makes_one_flat_composite_in_order() -> None:
    a, b, c = FakeDevice("a"), FakeDevice("b"), FakeDevice("c")
    result = append_auxiliary_output(append_auxiliary_output(a, b), c)
    assert isinstance(result, CompositeDeviceAuxiliaryOutput)
    assert result.outputs == (a, b, c)


def test_appending_flattens_composites_on_both_sides_at_any_depth() -> None:
    a, b, c, d, e = (FakeDevice(name) for name in "abcde")
    deep = CompositeDeviceAuxiliaryOutput(
        (a, CompositeDeviceAuxiliaryOutput((b, CompositeDeviceAuxiliaryOutput((c,)))))
    )
    result = append_auxiliary_output(deep, CompositeDeviceAuxiliaryOutput((d, CompositeDeviceAuxiliaryOutput((e,)))))
    assert isinstance(result, CompositeDeviceAuxiliaryOutput)
    assert result.outputs == (a, b, c, d, e)


def test_appending_leaves_the_composite_it_was_given_alone() -> None:
    a, b, c = FakeDevice("a"), FakeDevice("b"), FakeDevice("c")
    current = CompositeDeviceAuxiliaryOutput((a, b))
    append_auxiliary_output(current, c)
    assert current.outputs == (a, b)
