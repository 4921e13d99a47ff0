"""The forward of a Hugging Face model in this process, with taps on its layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ...hooks import (
    Collector,
    GatheredRows,
    LogitsHead,
    TapError,
    Taps,
    compiled_layers,
    find_logits_head,
    probe,
    require_causal,
)
from ...models.blocked_attention import blocked_attention, blocks_are_faster
from ...models.call import input_device, without_cache
from ...models.decoder import Decoder, find_decoder
from ...models.errors import RunError, UsageError
from ...models.float32_products import FLOAT32_PRODUCTS, float32_is_faster
from ...models.kept_memory import KeptMemory, kept_memory
from ...models.loading import LoadedModel
from ...models.pipeline import pipeline_group_of
from ..identity import device_name
from ..mixin import require_single_stage
from ..outputs import DeviceAuxiliaryOutput, RowLayout
from ..store import Column, capture_columns, generation_columns
from .batches import TokenBatch
from .checked_rows import RowCheck
from .settings import CaptureSettings


@dataclass(frozen=True)
class AttachedModel:
    """What the taps were attached to, for the files that speak of it."""

    decoder: Decoder
    taps: Taps
    hidden_size: int
    dtype: torch.dtype
    norm_path: str | None
    logits_head: LogitsHead | None = None
    top_logits: int = 0

    @property
    def norm_size(self) -> int:
        """Width of the norm states: H, but where an adapter keeps several streams side by side."""
        widths = self.decoder.widths
        return self.hidden_size if not widths or self.hidden_size in widths else max(widths)

    def columns(self, store_dtype: torch.dtype, *, is_text: bool = False) -> tuple[Column, ...]:
        """The columns of a shard of these taps; `is_text` in a run with images."""
        taps = self.taps
        rows = capture_columns(
            len(taps.boundaries),
            self.hidden_size,
            store_dtype,
            pre_norm=taps.pre_norm,
            post_norm=taps.post_norm,
            is_text=is_text,
        )
        rows = tuple(replace(c, shape=(self.norm_size,)) if c.name in ("pre_norm", "post_norm") else c for c in rows)
        top = [c for c in generation_columns(topk=self.top_logits) if c.name.startswith("topk_")]
        return (*rows, *top)


@dataclass(frozen=True)
class FastForwards:
    """How the forwards of a run go faster than the model says.

    Attributes:
        ways: what is computed otherwise, for the headers of shards: ``attention`` in blocks, ``products`` in float32.
        memory: what the process keeps of the memory it frees; None where that is as ever.
    """

    ways: Mapping[str, str]
    memory: KeptMemory | None


class HuggingFaceEngine:
    """Taps on a model in this process. The forward ends after the last tap: no lm_head, no cache, no later layer."""

    def __init__(
        self,
        attached: AttachedModel,
        collector: Collector,
        store_dtype: torch.dtype,
        tap_names: tuple[str, ...],
        *,
        fast: FastForwards,
    ) -> None:
        """`tap_names`: what the taps are called where a fault of their rows is told, in slot order."""
        self._collector = collector
        self._attached, self._model = attached, attached.decoder.model
        self._compiled = ExitStack()
        self._arguments = without_cache(self._model)
        self._fast = fast
        self.device = input_device(self._model)
        self._check = RowCheck.of(attached.taps, store_dtype, tap_names, self.device)

    @property
    def made_with(self) -> dict[str, str]:
        """What a shard says of the device that computed it, and of what was computed otherwise than the model says."""
        return {"device": device_name(self.device), **self._fast.ways}

    def set_compiled(self, compiled: bool) -> None:
        """Run decoder layers compiled one by one, or as they are, from the next forward on."""
        self._compiled.close()
        if compiled:
            self._compiled.enter_context(compiled_layers(self._attached.decoder))

    @torch.inference_mode()
    def forward(self, batch: TokenBatch) -> DeviceAuxiliaryOutput:
        positions, taps = batch.positions, self._collector.taps
        index = None if positions.all_real else self._sent(positions.flat_index())
        slots = GatheredRows(len(taps.boundaries), index, positions.T)
        with self._collector.armed(slots, positions.B, positions.S, stop=True):
            if batch.inputs is None:
                self._model(self._sent(batch.input_ids), **self._arguments)
            else:
                self._run_with_images(batch.inputs)
        if self._fast.memory is not None:
            self._fast.memory.tidy()
        return self._output(slots, RowLayout.of_prompts(positions.lengths))

    def _run_with_images(self, inputs: Mapping[str, Tensor]) -> None:
        """The model over what its processor made, pictures in the dtype that it computes in."""
        sent = {
            name: self._sent(value.to(self._attached.dtype) if value.is_floating_point() else value)
            for name, value in inputs.items()
        }
        try:
            self._model(**sent, **self._arguments)
        except (TypeError, ValueError) as error:
            raise RunError(
                f"{type(self._model).__name__} did not take what its processor made of the images of a sample "
                f"({', '.join(sent)}): {type(error).__name__}: {error}"
            ) from error

    def _sent(self, tensor: Tensor) -> Tensor:
        """`tensor` on the device, without waiting for it: from pinned memory, the only kind that is copied behind one's back."""
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def _output(self, slots: GatheredRows, layout: RowLayout) -> DeviceAuxiliaryOutput:
        tapped, asked = self._collector.taps, self._attached.taps
        norms = [name for name, there in (("pre_norm", tapped.pre_norm), ("post_norm", tapped.post_norm)) if there]
        computed = {name: slots.norms[len(tapped.boundaries) + i] for i, name in enumerate(norms)}
        top = self._top_logits(computed["post_norm"]) if self._attached.top_logits else {}
        if not asked.post_norm:
            computed.pop("post_norm", None)
        if slots.aux_hidden_states is not None:
            computed = {"aux_hidden_states": slots.aux_hidden_states, **computed}
        # A model spread over several devices gives its states on several; they leave from one.
        computed = {name: rows.to(self.device) for name, rows in computed.items()}
        return self._check.output(computed, layout, top)

    def _top_logits(self, post_norm: Tensor) -> dict[str, Tensor]:
        if self._attached.logits_head is None:
            raise TapError("top logits were asked for without a head to make them.")
        top = self._attached.logits_head.top(post_norm, self._attached.top_logits)
        columns = {"topk_logits": top.values, "topk_ids": top.ids, "topk_logsumexp": top.logsumexp}
        return {name: column.to(self.device) for name, column in columns.items()}


def attach(model: nn.Module, settings: CaptureSettings) -> tuple[AttachedModel, Collector]:
    """Find the layers of `model`, see that the taps are true, and make their collector.

    Raises:
        PipelineCaptureError, DecoderNotFoundError, AdapterError, LayerIdError, LayerIdTypeError, DraftConfigError, TapError.
    """
    require_single_stage(getattr(model, "pp_group", None) or pipeline_group_of(model), "DSPARK")
    decoder = find_decoder(model, adapter=settings.adapter)
    taps = settings.taps(decoder.n)
    tapped = taps.with_post_norm() if settings.top_logits else taps
    truth = probe(decoder)
    truth.require(decoder, taps.boundaries)
    norm = truth.require_norm(decoder) if tapped.final != "none" else truth.norm
    if truth.hidden_size is None or truth.dtype is None:
        raise TapError(f"no decoder layer of {type(model).__name__} gave a hidden state when it was tried.")
    head = find_logits_head(decoder, norm.module) if settings.top_logits and norm else None
    if head is not None and settings.top_logits > head.vocabulary:
        raise UsageError(f"top_logits is {settings.top_logits}, but the model has {head.vocabulary} logits.")
    collector = Collector(decoder, tapped, norm.module if norm else None)
    if not settings.exact:
        require_causal(decoder, collector)
    path = norm.path if norm else None
    attached = AttachedModel(decoder, taps, truth.hidden_size, truth.dtype, path, head, settings.top_logits)
    return attached, collector


@contextmanager
def fast_forwards(attached: AttachedModel, settings: CaptureSettings) -> Iterator[FastForwards]:
    """Forwards inside the block are as fast as a run with `settings` makes them.

    An exact run and one that spreads the model over processes compute as the model says, and an attention that was named stays.
    """
    device, dtype = input_device(attached.decoder.model), attached.dtype
    as_the_model_says = settings.exact or settings.tp > 1
    named = settings.model.attn_implementation is not None
    ways = {}
    with ExitStack() as block:
        memory = block.enter_context(kept_memory(device))
        if not as_the_model_says and not named and blocks_are_faster(device, dtype):
            block.enter_context(blocked_attention())
            ways["attention"] = "in blocks"
        if not as_the_model_says and float32_is_faster(device, dtype):
            block.enter_context(FLOAT32_PRODUCTS)
            ways["products"] = "in float32"
        yield FastForwards(ways, memory)


@contextmanager
def attached_engine(
    attached: AttachedModel, collector: Collector, store_dtype: torch.dtype, settings: CaptureSettings
) -> Iterator[HuggingFaceEngine]:
    """The hooks are on the model inside the block alone."""
    with fast_forwards(attached, settings) as fast:
        engine = HuggingFaceEngine(attached, collector, store_dtype, settings.tap_names(attached.taps), fast=fast)
        collector.attach()
        try:
            yield engine
        finally:
            engine.set_compiled(False)
            collector.detach()


@dataclass(frozen=True)
class HuggingFaceBackend:
    """A model in this process, and the taps to put on it."""

    settings: CaptureSettings
    loaded: LoadedModel
    attached: AttachedModel
    collector: Collector

    def engine(self, store_dtype: torch.dtype, longest: int) -> AbstractContextManager[HuggingFaceEngine]:  # noqa: ARG002
        """The engine, for samples of any length; its hooks are on the model inside the block alone."""
        return attached_engine(self.attached, self.collector, store_dtype, self.settings)
