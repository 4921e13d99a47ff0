"""The forward of a Hugging Face model in this process, with taps on its layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .....hooks import (
    AtOnce,
    Collector,
    GatheredRows,
    TapError,
    TappedModel,
    Taps,
    compiled_layers,
    find_logits_head,
    one_after_the_other,
    with_post_norm,
)
from .....models.call import input_device, without_cache
from .....models.cpu import AS_THE_MODEL_IS, FastPaths, fast_paths
from .....models.errors import RunError, UsageError
from ....identity import device_name
from ....outputs import DeviceAuxiliaryOutput, RowLayout
from ...attached_model import AttachedModel
from ...batches import TokenBatch
from ...settings import CaptureSettings
from ..row_check import RowCheck
from .sample_cache import SampleCache


class HuggingFaceEngine:
    """Taps on a model in this process. The forward ends after the last tap: no lm_head, no cache, no later layer."""

    def __init__(
        self,
        attached: AttachedModel,
        collector: Collector,
        store_dtype: torch.dtype,
        tap_names: tuple[str, ...],
        *,
        fast: FastPaths,
    ) -> None:
        """`tap_names`: what the taps are called where a fault of their rows is told, in slot order."""
        self._collector = collector
        self._attached, self._model = attached, attached.decoder.model
        self._compiled = ExitStack()
        self._arguments = without_cache(self._model)
        self._limits = attached.limits
        self._fast = fast
        self.device = input_device(self._model)
        self._sample_cache = SampleCache(self._model)
        self._check = RowCheck.of(attached.taps, store_dtype, tap_names, self.device)

    @property
    def made_with(self) -> dict[str, str]:
        """Provenance for the shard header: the device, and any fast path that replaced the model's own computation."""
        return {"device": device_name(self.device), **self._fast.made_with}

    def set_compiled(self, compiled: bool) -> None:
        """Run decoder layers compiled one by one, or as they are, from the next forward on."""
        self._compiled.close()
        if compiled:
            self._compiled.enter_context(compiled_layers(self._attached.decoder))

    @torch.inference_mode()
    def forward(self, batch: TokenBatch) -> DeviceAuxiliaryOutput:
        positions, taps, chunk = batch.positions, self._collector.taps, batch.chunk
        self._require_within_limits(batch)
        index = None if positions.all_real else self._sent(positions.flat_index())
        slots = GatheredRows(len(taps.boundaries), index, positions.T)
        with self._collector.armed(slots, positions.B, positions.S, stop=True):
            if batch.inputs is None:
                arguments = self._arguments if chunk is None else self._sample_cache.arguments(chunk)
                self._model(self._sent(batch.input_ids), **arguments)
            else:
                self._run_with_images(batch.inputs)
        self._fast.tidy()
        if chunk is None:
            return self._output(slots, RowLayout.of_prompts(positions.lengths))
        self._sample_cache.ran(chunk)
        return self._output(slots, RowLayout.of_prompts(positions.lengths, (chunk.begin,)))

    def _require_within_limits(self, batch: TokenBatch) -> None:
        positions, chunk = batch.positions, batch.chunk
        lengths, columns, held = positions.lengths, positions.S, 0
        if chunk is not None:
            lengths, columns, held = (chunk.end,), chunk.end, chunk.begin
        fault = self._limits.fault(lengths, columns, held) or self._limits.selection_fault(lengths, columns, held)
        if fault is not None:
            raise TapError(f"{type(self._model).__name__}: {fault}")

    def _run_with_images(self, inputs: Mapping[str, Tensor]) -> None:
        """Run the model over the processor's output, with images in the compute dtype."""
        sent = {
            name: self._sent(value.to(self._attached.dtype) if value.is_floating_point() else value)
            for name, value in inputs.items()
        }
        try:
            self._model(**sent, **self._arguments)
        except (TypeError, ValueError, AttributeError) as error:
            raise RunError(
                f"{type(self._model).__name__} did not take what its processor made of the images of a sample "
                f"({', '.join(sent)}): {type(error).__name__}: {error}. Model and processor may be of different releases: one "
                "the checkpoint's own code, the other transformers'."
            ) from error

    def _sent(self, tensor: Tensor) -> Tensor:
        """Copy `tensor` to the device asynchronously, through pinned memory: only pinned memory can be copied asynchronously."""
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
        top = self._attached.logits_head.top(post_norm, self._attached.top_logits, self._attached.top_logits_p)
        columns = {"topk_logits": top.values, "topk_ids": top.ids, "topk_logsumexp": top.logsumexp}
        return {name: column.to(self.device) for name, column in columns.items()}


def attach(
    model: nn.Module, settings: CaptureSettings, at_once: AtOnce = one_after_the_other
) -> tuple[AttachedModel, Collector]:
    """Tap `model` as `settings` say, and prove what a run with them relies on; `at_once`: see `hooks.Company`.

    Raises:
        PipelineCaptureError, DecoderNotFoundError, AdapterError, LayerIdError, LayerIdTypeError, DraftConfigError, TapError.
    """
    final = with_post_norm(settings.final) if settings.top_logits else settings.final
    tapped = TappedModel.of(model, settings.layers, final, adapter=settings.adapter, at_once=at_once)
    head = find_logits_head(tapped.decoder, tapped.norm.module) if settings.top_logits and tapped.norm else None
    if head is not None and settings.top_logits > head.vocabulary:
        raise UsageError(f"top_logits is {settings.top_logits}, but the model has {head.vocabulary} logits.")
    if not settings.exact:
        tapped.company.require_batches()
    if settings.prefill_chunk is not None:
        tapped.company.require_chunks()
    attached = AttachedModel(
        tapped.decoder,
        Taps(tapped.taps.boundaries, settings.final),
        tapped.hidden_size,
        tapped.norm_size,
        tapped.dtype,
        tapped.norm_path,
        head,
        settings.top_logits,
        settings.top_logits_p,
        tapped.limits,
    )
    return attached, tapped.collector


def fast_forwards(attached: AttachedModel, settings: CaptureSettings) -> AbstractContextManager[FastPaths]:
    """Return the context in which forwards are as fast as a run with `settings` makes them.

    An exact run, or one that spreads the model over processes, computes as the model does; a named attention stays.
    """
    if settings.cpu_fast_paths == "off":
        return nullcontext(AS_THE_MODEL_IS)
    return fast_paths(
        input_device(attached.decoder.model),
        attached.dtype,
        same_bits=settings.exact or settings.tp > 1,
        attention_named=settings.model.attn_implementation is not None,
    )


@contextmanager
def attached_engine(
    attached: AttachedModel, collector: Collector, store_dtype: torch.dtype, settings: CaptureSettings
) -> Iterator[HuggingFaceEngine]:
    """Attach the hooks to the model inside the block only."""
    with fast_forwards(attached, settings) as fast:
        engine = HuggingFaceEngine(attached, collector, store_dtype, settings.tap_names(attached.taps), fast=fast)
        collector.attach()
        try:
            yield engine
        finally:
            engine.set_compiled(False)
            collector.detach()


def identity_of_mode(settings: CaptureSettings) -> Mapping[str, Any]:
    """Return what the header says of how rows are computed: one sample a forward, or in batches; long ones in chunks."""
    return {"mode": "exact" if settings.exact else "batched", "prefill_chunk": settings.prefill_chunk}
