"""A Hugging Face model whose decoder layers are read from its checkpoint while it runs, each once for many batches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from .....hooks import Collector, Taps
from .....models.loading import load_layer_by_layer
from .....models.memory import available_bytes
from .....models.streaming import Aside, LayerSweep, StreamedNeeds, in_host_memory
from ....outputs import CopyTensor, DeviceAuxiliaryOutput, HostAuxiliaryOutput
from ...batches import MOST_PADDING, TokenBatch
from ...distributed.ranks import Ranks
from ...pacing.block_pacer import BlockTimes
from ...pacing.budget import ACCELERATOR_SIZES, CPU_SIZES
from ...settings import CaptureSettings
from .engine import HuggingFaceEngine, attach, attached_engine
from .opened import OpenedModel

# Of the memory that is free once the model is open, the share that the states of a block may take; the rest is for the
# activations of one batch inside one layer.
SHARE_FOR_STATES = 0.5
# States of one position that are alive between two layers: the residual stream, and what a forward keeps of its inputs
# (embeddings, position embeddings, masks).
KEPT_STATES = 3
MOST_POSITIONS = 1 << 20


R = TypeVar("R")


@dataclass(frozen=True)
class StreamedBackend(OpenedModel):
    """A model without its layers, and what brings them in."""

    sweep: LayerSweep
    takes_images: bool = False

    @classmethod
    def of(cls, settings: CaptureSettings, ranks: Ranks) -> StreamedBackend:
        """Open the model on the accelerator of this rank and prove its taps, reading each layer as the proof needs it.

        Raises:
            UsageError: as `load_layer_by_layer` and `attach`.
        """
        needs_head = settings.head or settings.top_logits > 0
        loaded, store = load_layer_by_layer(ranks.placed(settings.model), head=needs_head)
        sweep = LayerSweep(store)

        def in_one_reading(collector: Collector, forwards: Sequence[Callable[[], R]]) -> list[R]:
            return sweep.run(forwards, layers=_passed(sweep, collector.taps), paused=_aside(collector))

        with sweep.attached(), store.without_head(), torch.inference_mode():
            attached, collector = attach(loaded.model, settings, in_one_reading)
        return cls(settings, loaded, attached, collector, sweep)

    @contextmanager
    def engine(self, store_dtype: torch.dtype, longest: int) -> Iterator[StreamedEngine]:  # noqa: ARG002 - of any length
        """Return the engine, for samples of up to `longest` tokens, open once: the block closes the checkpoint's files.

        Its hooks are on the model inside the block alone.
        """
        with (
            self.sweep.store.reader.closing(),
            self.sweep.attached(),
            attached_engine(self.attached, self.collector, store_dtype, self.settings) as engine,
        ):
            yield StreamedEngine(engine, self.sweep, self.collector, self._device_positions(engine.device))

    def pacer(self, engine: StreamedEngine, tokens: int, note: Callable[[str], None]) -> BlockPace:  # noqa: ARG002
        """Return what gathers batches into blocks."""
        settings = self.settings
        sizes = CPU_SIZES if engine.device.type == "cpu" else ACCELERATOR_SIZES
        size = 1 if settings.exact else settings.batch_tokens or sizes[-1]
        block = settings.block_tokens or min(MOST_POSITIONS, self._positions_that_fit(engine.device))
        padding = 0.0 if settings.exact else MOST_PADDING
        return BlockPace(engine, size, block, note, most_padding=padding, state_bytes=self._state_bytes)

    @property
    def _state_bytes(self) -> int:
        """Bytes that one position takes between two layers: what is tapped of it, and its states on the way."""
        taps = self.collector.taps
        states = len(taps.boundaries) + taps.pre_norm + taps.post_norm + KEPT_STATES
        return states * self.attached.hidden_size * self.attached.dtype.itemsize

    def _positions_on(self, device: torch.device) -> int:
        """Return how many positions of a block have room for their states on `device`."""
        layers = 2 * self.sweep.store.needs.layer  # what stands outside them is in memory already
        return max(1, int(SHARE_FOR_STATES * max(0, available_bytes(device) - layers)) // self._state_bytes)

    def _device_positions(self, device: torch.device) -> int:
        return sys.maxsize if device.type == "cpu" else self._positions_on(device)

    def _positions_that_fit(self, device: torch.device) -> int:
        on_device = self._positions_on(device)
        if device.type == "cpu":
            return on_device
        return on_device + int(SHARE_FOR_STATES * available_bytes(torch.device("cpu"))) // self._state_bytes


class StreamedEngine:
    """Runs batches through a layer before the next layer is loaded."""

    def __init__(
        self, engine: HuggingFaceEngine, sweep: LayerSweep, collector: Collector, device_positions: int
    ) -> None:
        """`device_positions`: of a block, whose states have room on the device; the others wait in host memory."""
        self._engine, self._sweep, self._collector = engine, sweep, collector
        self._device_positions = device_positions
        self.device = engine.device

    @property
    def made_with(self) -> dict[str, str]:
        """Provenance for the shard header."""
        return {**self._engine.made_with, "weights": "streamed"}

    def forward(self, batch: TokenBatch) -> DeviceAuxiliaryOutput:
        """Return the hidden states of one batch; every layer is read for it alone."""
        return self.forwards([batch], check_stop=_never)[0]

    @torch.inference_mode()  # around all of them: a forward that is paused leaves its own mode on in this thread
    def forwards(self, batches: Sequence[TokenBatch], *, check_stop: Callable[[], None]) -> list[DeviceAuxiliaryOutput]:
        """Return the hidden states of each batch; every layer is read once. `check_stop` is called between layers."""
        on_device = self._first_on_host(batches)
        return self._sweep.run(
            [partial(self._run, batch, on_host=number >= on_device) for number, batch in enumerate(batches)],
            layers=_passed(self._sweep, self._collector.taps),
            paused=_aside(self._collector, on_device),
            between_layers=check_stop,
        )

    def _run(self, batch: TokenBatch, *, on_host: bool) -> DeviceAuxiliaryOutput:
        output = self._engine.forward(batch)
        return _OnHost(output.copy_to_host(Tensor.cpu)) if on_host else output

    def _first_on_host(self, batches: Sequence[TokenBatch]) -> int:
        """Return the number of the first batch whose states have no room on the device beside those before it."""
        positions = accumulate(batch.positions.B * batch.positions.S for batch in batches)
        return sum(total <= self._device_positions for total in positions)

    @property
    def needs(self) -> StreamedNeeds:
        return self._sweep.store.needs

    def times(self, batches: Sequence[TokenBatch]) -> BlockTimes:
        """Return what a block of `batches` takes; what their forwards gave is dropped."""
        sweep, reader = self._sweep, self._sweep.store.reader
        loading, computing, read = sweep.loading, sweep.computing, reader.bytes_read
        self.forwards(batches, check_stop=_never)
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        positions = sum(batch.positions.B * batch.positions.S for batch in batches)
        return BlockTimes(positions, reader.bytes_read - read, sweep.loading - loading, sweep.computing - computing)


class BlockPace:
    """Batches of one size in blocks of whole shards, of up to `block_tokens` positions or one shard."""

    def __init__(
        self,
        engine: StreamedEngine,
        batch_tokens: int,
        block_tokens: int,
        note: Callable[[str], None],
        *,
        most_padding: float,
        state_bytes: int,
    ) -> None:
        """`state_bytes`: of one position between two layers."""
        self._engine, self._note, self.state_bytes = engine, note, state_bytes
        self.most_padding, self.batch_tokens, self.block_tokens = most_padding, batch_tokens, block_tokens

    def next_size(self) -> int:
        return self.batch_tokens

    def forward(self, batch: TokenBatch, size: int) -> DeviceAuxiliaryOutput:  # noqa: ARG002 - of every size the same
        return self._engine.forward(batch)

    def forward_block(
        self, batches: Sequence[TokenBatch], check_stop: Callable[[], None]
    ) -> list[DeviceAuxiliaryOutput]:
        """Return what each batch gave, in order."""
        return self._engine.forwards(batches, check_stop=check_stop)

    @property
    def needs(self) -> StreamedNeeds:
        return self._engine.needs

    def times(self, batches: Sequence[TokenBatch]) -> BlockTimes:
        """Run `batches` as a block, drop what they gave, and return what it took."""
        return self._engine.times(batches)

    def limit(self, failed: int) -> None:
        self.batch_tokens = max(1, failed // 2)

    def limit_block(self, failed: int) -> None:
        """Make later blocks smaller: one of `failed` positions did not fit the device."""
        self.block_tokens = max(1, failed // 2)

    def remember(self) -> None:
        """Nothing was learnt."""


@dataclass(frozen=True)
class _OnHost:
    """An output that was copied to the host before its block ended."""

    host: HostAuxiliaryOutput

    def copy_to_host(self, _copy_tensor: CopyTensor) -> HostAuxiliaryOutput:
        return self.host


def _aside(collector: Collector, on_device: int | None = None) -> Aside:
    """Return the context in which a forward is paused; the states of those from number `on_device` on wait in host memory."""

    @contextmanager
    def aside(number: int, states: Sequence[Tensor]) -> Iterator[None]:
        on_host = on_device is not None and number >= on_device
        with collector.set_aside() as tapped, in_host_memory([*states, *tapped] if on_host else []):
            yield

    return aside


def _passed(sweep: LayerSweep, taps: Taps) -> tuple[int, ...]:
    """Return the layers that a forward enters before it ends after its last tap."""
    decoder = sweep.store.decoder
    last = decoder.n - 1 if taps.final != "none" else max(decoder.site(b).layer for b in taps.boundaries)
    return tuple(layer for layer in sweep.order if layer <= last)


def _never() -> None:
    """Do nothing: a run of one batch is not stopped between layers."""
