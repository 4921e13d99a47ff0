"""Settings of one offline run, in groups that check themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...models.checked_fields import CheckedFields
from ...models.choices import CompileMode, CpuFastPaths, OnBadValues, StoreDtypeName, dtype_name
from ...models.errors import UsageError
from ..engines import ENGINES, require_engine
from ..settings import FolderSettings, LayerSettings, RunPlaces, TextSettings

STORE_DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


@dataclass(frozen=True, kw_only=True)
class StoreSettings(FolderSettings):
    """Settings of what is stored of each row.

    Attributes:
        top_logits: how many of the largest logits of each row are stored, with their ids and the log-sum-exp of all.
        top_logits_p: of these, store the fewest whose probabilities add up to this much, 0 to 1; the other places of a row hold
            NaN and id -1. 1 stores all of them.
        store_dtype: dtype of the stored rows (``bf16`` and the like are taken too), or None for the one the model computes in.
        on_bad_values: what becomes of a sample with rows that are not finite or all zero.
        force: start even if the disk has too little room for the whole run.
    """

    top_logits: int = 0
    top_logits_p: float = 1.0
    store_dtype: StoreDtypeName | None = None
    on_bad_values: OnBadValues = "reject"
    force: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "store_dtype", dtype_name(self.store_dtype))
        super().__post_init__()
        self.require_at_least(top_logits=0)
        if not 0 < self.top_logits_p <= 1:
            raise UsageError(f"top_logits_p must lie above 0 and at most at 1; got {self.top_logits_p}.")
        if self.top_logits_p < 1 and not self.top_logits:
            raise UsageError(
                "top_logits_p (--top-logits-p) cuts stored top logits: give top_logits (--top-logits K) too."
            )


@dataclass(frozen=True, kw_only=True)
class SpeedSettings(CheckedFields):
    """Settings of batching, compiling and spreading forwards.

    Attributes:
        batch_tokens: positions of one forward, padding included, or None to try sizes out on the first batches.
        exact: one sample a forward, so that every row is, bit for bit, that of a plain forward.
        prefill_chunk: run a sample of more tokens than this alone, in chunks of so many, each behind the key-value cache of those
            before it; None runs every sample whole. Activations then take memory by the chunk, and rows leave chunk by chunk. A
            sample with images runs whole.
        compile: whether decoder layers are compiled; ``auto``: where that saves more time than it costs. Never in an exact run.
        tp: how many processes hold one copy of the model together, each a part of every layer, as torchrun starts them.
        stream_weights: read decoder layers from the checkpoint while the model runs, each once for a block of batches, so that
            two layers are in memory at a time. The rows are the same.
        block_tokens: positions of a block, padding included, or None for as many as fit the memory; a block is one shard at
            least.
        cpu_fast_paths: ``auto``: open the paths of `models.cpu` that are faster on this machine, of which some set something
            process-wide until the run ends; ``off``: compute as the model does. The command's default is ``auto``.
    """

    batch_tokens: int | None = None
    exact: bool = False
    prefill_chunk: int | None = None
    compile: CompileMode = "auto"
    tp: int = 1
    stream_weights: bool = False
    block_tokens: int | None = None
    cpu_fast_paths: CpuFastPaths = "off"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(batch_tokens=1, prefill_chunk=1, tp=1, block_tokens=1)
        self._require_one_way_for_chunks()
        if self.block_tokens is not None and not self.stream_weights:
            raise UsageError(
                "block_tokens (--block-tokens) is the size of a block of streamed weights (--stream-weights)."
            )
        if self.stream_weights and self.tp > 1:
            raise UsageError("streamed weights lie on one device; stream_weights and tp exclude each other.")
        if self.stream_weights and self.compile == "on":
            raise UsageError(
                "layers whose weights come and go are not compiled; stream_weights and compile=on exclude each other."
            )
        if self.exact and self.batch_tokens is not None:
            raise UsageError(
                "exact runs one sample a forward, so batch_tokens (--batch-tokens) has no meaning beside it; give "
                "one of them."
            )
        if self.exact and self.tp > 1:
            raise UsageError(
                "a tensor-parallel model adds up in another order than one process does, so exact and tp exclude each other."
            )
        if self.exact and self.compile == "on":
            raise UsageError(
                "compiled layers give other bits than a plain forward, so exact and compile=on (--exact, --compile on) exclude "
                "each other."
            )

    def _require_one_way_for_chunks(self) -> None:
        if self.prefill_chunk is None:
            return
        others = (
            (self.exact, "exact", "runs every sample in one plain forward, whose bits chunks do not give"),
            (self.stream_weights, "stream_weights", "runs each layer once over whole samples"),
            (self.tp > 1, "tp", "sends whole batches to the processes of a group"),
            (self.compile == "on", "compile=on", "would compile layers again for every length of the cache"),
        )
        for asked, name, why in others:
            if asked:
                raise UsageError(f"{name} {why}, so prefill_chunk (--prefill-chunk) and {name} exclude each other.")


@dataclass(frozen=True)
class RayWorkers(CheckedFields):
    """The worker processes of engine ``ray``, each with a model of its own.

    Attributes:
        count: how many.
        gpus: GPUs of each, or a part of one; None: one where the cluster has GPUs, else none.
        address: of a running cluster, such as ``auto`` or ``10.0.0.1:6379``; None: the one in RAY_ADDRESS, else one on this
            machine that lives as long as the run.

    Raises:
        UsageError: fewer than one worker, or fewer than no GPU.

    Example:
        >>> CaptureSettings("MODEL", "chats.jsonl", "OUT2", layer_ids=[1], engine="ray", ray=RayWorkers(2, gpus=0.5)).ray.count
        2
    """

    count: int = 1
    gpus: float | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.count < 1:
            raise UsageError(f"a run needs at least 1 Ray worker; got {self.count}.")
        if self.gpus is not None and self.gpus < 0:
            raise UsageError(f"GPUs of a Ray worker must be at least 0; got {self.gpus}.")


@dataclass(frozen=True, kw_only=True)
class EngineSettings(CheckedFields):
    """Settings of the inference backend.

    Attributes:
        engine: the inference backend, one of `capture.engines.ENGINES`: ``hf``, ``ray`` or ``vllm``.
        engine_options: arguments of `vllm.LLM`, such as ``{"tensor_parallel_size": 8}``.
        ray: the workers of engine ``ray``.
    """

    engine: str = "hf"
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    ray: RayWorkers = RayWorkers()

    def __post_init__(self) -> None:
        super().__post_init__()
        require_engine(self.engine, self.engine_options)
        if self.ray != RayWorkers() and not ENGINES[self.engine].takes_workers:
            raise UsageError(
                f"Ray workers (--workers, --gpus-per-worker, --ray-address) need --engine ray; got {self.engine!r}."
            )


@dataclass(frozen=True)
class CaptureSettings(EngineSettings, SpeedSettings, StoreSettings, LayerSettings, RunPlaces):
    """One offline run: what it reads and writes, its layers, and how it stores and computes.

    Refuses wrong types and values at once, before a model is loaded. The fields are those of the groups that it is made of:
    `RunPlaces`, `LayerSettings`, `StoreSettings`, `SpeedSettings` and `EngineSettings`.

    Attributes:
        text: how input rows become samples.
        answers: a folder of regenerated answers to `data`, which a regeneration makes; its samples are captured instead of the
            rows of `data`.

    Raises:
        UsageError: a value that cannot be used; UsageTypeError for a wrong type; LayerIdError, LayerIdTypeError for layer ids.

    Example:
        >>> settings = CaptureSettings("org/model", "chats.jsonl", "OUT", layer_ids=[1, 14, 26], store_dtype="bf16")
        >>> settings.model.name, settings.data, settings.store_dtype
        ('org/model', ('chats.jsonl',), 'bfloat16')
    """

    text: TextSettings = field(default_factory=TextSettings, kw_only=True)
    answers: Path | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tp > 1 and not ENGINES[self.engine].spreads:
            raise UsageError(
                f"tp spreads a Hugging Face model; the engine {self.engine} has options of its own for it."
            )
