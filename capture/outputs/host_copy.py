"""The one copy of a step's auxiliary output from the device to the host."""

import torch
from torch import Tensor

from ...models.errors import RunError
from .contract import DeviceAuxiliaryOutput, HostAuxiliaryOutput

_BLOCKING_DEVICES = frozenset({"cpu", "mps"})
"""Device types without a side stream to copy on: on `cpu` there is nothing to copy, `mps` copies before it returns."""


class HostCopy:
    """Copies the outputs of one device to the host, step after step; one per run.

    On an accelerator the copies run on a stream of their own, behind the stream that made the tensors, into pinned
    memory. That memory comes from torch's pinned allocator, which hands a buffer out again only after the last tensor
    on it is gone and its copy is done: a consumer may keep what it got for as long as it likes.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._stream = None if self._device.type in _BLOCKING_DEVICES else torch.Stream(self._device)

    def start(self, output: DeviceAuxiliaryOutput) -> "PendingHostCopy":
        """Queue one copy per tensor of `output`, then record one event behind them all."""
        if self._stream is None:
            return PendingHostCopy(output.copy_to_host(_copied_before_return), None)
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        host = output.copy_to_host(self._copy_tensor)
        return PendingHostCopy(host, self._stream.record_event())

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu" or self._stream is None:
            return _copied_before_return(tensor)
        if tensor.device != self._device:
            # The event is recorded on this device's stream and says nothing of copies elsewhere.
            raise RunError(
                f"a tensor on {tensor.device} was given to the host copy of {self._device}; move it there first."
            )
        with self._stream:
            host = _pinned_like(tensor).copy_(tensor, non_blocking=True)
        # The output drops its reference right after this call; the memory must outlive the queued copy.
        tensor.record_stream(self._stream)
        return host


class PendingHostCopy:
    """A host output whose tensors are being filled."""

    def __init__(self, output: HostAuxiliaryOutput, event: torch.Event | None) -> None:
        self._output = output
        self._event = event

    def wait(self) -> HostAuxiliaryOutput:
        """Block until every tensor can be read, and return the output."""
        if self._event is not None:
            self._event.synchronize()
        return self._output


def _copied_before_return(tensor: Tensor) -> Tensor:
    # A CPU tensor is returned as it is: the contract says that no later forward writes into it.
    return tensor.to("cpu")


def _pinned_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
