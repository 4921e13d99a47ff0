"""The one copy of a step to the host: on CPU nothing, on an accelerator queued behind the producer."""

from collections.abc import Callable
from types import TracebackType
from typing import Any

import pytest
import torch
from torch import Tensor

from hiddentap.capture.outputs import (
    CompositeDeviceAuxiliaryOutput,
    DeviceHiddenStates,
    HostCopy,
    HostHiddenStates,
    RowLayout,
    host_copy,
)

needs_accelerator = pytest.mark.skipif(
    not torch.accelerator.is_available(), reason="needs an accelerator: checks real streams and pinned memory"
)


def hidden_states(*columns: Tensor) -> DeviceHiddenStates:
    named = {f"column{index}": column for index, column in enumerate(columns)}
    return DeviceHiddenStates(named, RowLayout.of_prompts([len(columns[0])]))


def test_on_cpu_a_tensor_is_handed_over_as_it_is() -> None:
    tensor = torch.arange(6.0).view(3, 2)
    host = HostCopy("cpu").start(hidden_states(tensor)).wait()
    assert isinstance(host, HostHiddenStates)
    assert host.columns["column0"] is tensor


def test_waiting_twice_gives_the_same_output() -> None:
    pending = HostCopy("cpu").start(hidden_states(torch.zeros(1)))
    assert pending.wait() is pending.wait()


class FakeAccelerator:
    """Stands in for torch's streams and events, and notes in which order they are used."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "Stream", lambda device: FakeStream(self, f"side of {device}"))
        monkeypatch.setattr(
            torch.accelerator, "current_stream", lambda device: FakeStream(self, f"current of {device}")
        )
        monkeypatch.setattr(host_copy, "_pinned_like", lambda tensor: FakePinned(self, tensor))


class FakeStream:
    def __init__(self, accelerator: FakeAccelerator, name: str) -> None:
        self.calls, self.name = accelerator.calls, name

    def wait_stream(self, other: "FakeStream") -> None:
        self.calls.append((self.name, "waits for", other.name))

    def record_event(self) -> "FakeEvent":
        self.calls.append((self.name, "records the event"))
        return FakeEvent(self.calls)

    def __enter__(self) -> None:
        self.calls.append((self.name, "entered"))

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.calls.append((self.name, "left"))


class FakeEvent:
    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.calls = calls

    def synchronize(self) -> None:
        self.calls.append(("event", "waited for"))


class FakePinned:
    def __init__(self, accelerator: FakeAccelerator, source: "FakeDeviceTensor") -> None:
        self.calls, self.source = accelerator.calls, source

    def copy_(self, source: "FakeDeviceTensor", non_blocking: bool) -> "FakePinned":
        assert source is self.source
        self.calls.append((source.name, "copied", "without blocking" if non_blocking else "blocking"))
        return self


class FakeDeviceTensor:
    device = torch.device("cuda")

    def __init__(self, accelerator: FakeAccelerator, name: str) -> None:
        self.calls, self.name = accelerator.calls, name

    def record_stream(self, stream: FakeStream) -> None:
        self.calls.append((self.name, "kept for", stream.name))


class FakeOutput:
    def __init__(self, *tensors: Any) -> None:
        self.tensors = tensors

    def copy_to_host(self, copy_tensor: Callable[[Any], Any]) -> Any:
        return [copy_tensor(tensor) for tensor in self.tensors]


def test_on_an_accelerator_copies_run_behind_the_producer_and_one_event_is_recorded_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator = FakeAccelerator()
    accelerator.install(monkeypatch)
    first, second = FakeDeviceTensor(accelerator, "first"), FakeDeviceTensor(accelerator, "second")
    output: Any = CompositeDeviceAuxiliaryOutput((FakeOutput(first), FakeOutput(second)))  # type: ignore[arg-type]
    pending = HostCopy("cuda").start(output)
    assert accelerator.calls == [
        ("side of cuda", "waits for", "current of cuda"),
        ("side of cuda", "entered"),
        ("first", "copied", "without blocking"),
        ("side of cuda", "left"),
        ("first", "kept for", "side of cuda"),
        ("side of cuda", "entered"),
        ("second", "copied", "without blocking"),
        ("side of cuda", "left"),
        ("second", "kept for", "side of cuda"),
        ("side of cuda", "records the event"),
    ]
    pending.wait()
    assert accelerator.calls[-1] == ("event", "waited for")


def test_a_host_tensor_beside_device_tensors_is_handed_over_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeAccelerator().install(monkeypatch)
    tensor = torch.zeros(2)
    host: Any = HostCopy("cuda").start(FakeOutput(tensor)).wait()  # type: ignore[arg-type]
    assert host[0] is tensor


@needs_accelerator
def test_the_copy_holds_the_values_of_the_step_though_the_device_memory_is_used_again_at_once() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    copy = HostCopy(device)
    for step in range(50):
        output = hidden_states(torch.full((1 << 18,), float(step), device=device))
        pending = copy.start(output)
        torch.full((1 << 18,), -1.0, device=device)
        host = pending.wait()
        assert isinstance(host, HostHiddenStates)
        assert host.columns["column0"].is_pinned()
        assert host.columns["column0"].unique().tolist() == [float(step)]


@needs_accelerator
def test_a_pinned_buffer_is_never_handed_out_while_a_consumer_holds_it() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    copy = HostCopy(device)
    held = []
    for step in range(20):
        host = copy.start(hidden_states(torch.full((1024,), float(step), device=device))).wait()
        assert isinstance(host, HostHiddenStates)
        held.append(host.columns["column0"])
    assert len({tensor.data_ptr() for tensor in held}) == 20
    assert [tensor[0].item() for tensor in held] == [float(step) for step in range(20)]
