"""What one offline run is asked to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from ...hooks import Final, Taps
from ...models.errors import UsageError
from ...models.layer_ids import Algorithm, Convention
from ...models.loading import ModelSource
from ..data import TokeniseOptions
from .layer_choice import LayerChoice

EngineName = Literal["hf", "ray", "vllm"]
CompileMode = Literal["auto", "on", "off"]
OnBadValues = Literal["reject", "raise", "keep"]
STORE_DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


@dataclass(frozen=True)
class TextSettings:
    """How input rows become tokens; see `TokeniseOptions` for what each field means."""

    max_length: int = 4096
    on_too_long: str = "truncate"
    loss_on: str = "assistant"
    think: str = "keep"
    ids_format: str = "plain"
    chat_template: str | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
    limit: int | None = None
    workers: int = 0
    allow_rejects: bool = False

    def __post_init__(self) -> None:
        for name, least in (("max_length", 1), ("workers", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} must be at least {least}; got {getattr(self, name)}.")
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"limit must be at least 1; got {self.limit}.")

    def tokenise_options(self, source: ModelSource, *, date: str, vocab_rows: int | None) -> TokeniseOptions:
        return TokeniseOptions(
            tokenizer=source.name,
            revision=source.revision,
            trust_remote_code=source.trust_remote_code,
            chat_template=self.chat_template,
            template_args=self.template_args,
            template_date=date,
            max_length=self.max_length,
            on_too_long=self.on_too_long,
            loss_on=self.loss_on,
            think=self.think,
            ids_format=self.ids_format,
            strict=self.strict,
            vocab_rows=vocab_rows,
        )


@dataclass(frozen=True)
class RayWorkers:
    """The worker processes of engine ``ray``, each with a model of its own.

    Attributes:
        count: how many.
        gpus: GPUs of each, or a part of one; None: one where the cluster has GPUs, else none.
        address: where a cluster runs, such as ``auto`` or ``10.0.0.1:6379``; None: the one that RAY_ADDRESS names, else one on
            this machine that lives as long as the run.
    """

    count: int = 1
    gpus: float | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(f"a run needs at least 1 Ray worker; got {self.count}.")
        if self.gpus is not None and self.gpus < 0:
            raise UsageError(f"GPUs of a Ray worker must be at least 0; got {self.gpus}.")


@dataclass(frozen=True)
class CaptureSettings:
    """One offline run.

    Attributes:
        model: which model, and how it computes.
        data: files or data sets of conversations, texts or token ids.
        out: the folder that is filled.
        layer_ids: K ids under `convention`, or under the system `ids_of`.
        ids_of: whose ids they are, or those of `draft_config`: vllm, specforge, ...; see `models.id_systems`.
        draft_config: a drafter's config.json to take the ids from, instead of `layer_ids`.
        algorithm: take the default layers of eagle3, dflash or dspark instead.
        adapter: how the residual stream is read where it is not plain; see `models.adapters`.
        final: norm states to store beside them.
        head: whether the final norm, the lm_head and the embeddings are written to OUT/head as well.
        top_logits: how many of the largest logits of each row are stored, with their ids and the log-sum-exp of all.
        store_dtype: dtype of the stored rows, or None for the one the model computes in.
        batch_tokens: positions of one forward, padding included, or None to try sizes out on the first batches.
        exact: one sample a forward, so that every row is, bit for bit, that of a plain forward.
        compile: whether decoder layers are compiled; ``auto``: where that saves more time than it costs. Never in an exact run.
        shard_rows: most rows of one shard; a longer sample has a shard of its own.
        on_bad_values: what becomes of a sample with rows that are not finite or all zero.
        force: start even if the disk has too little room for the whole run.
        engine: what runs the forwards; ``hf``: the Hugging Face model in this process, ``ray``: such models in workers of a Ray
            cluster, ``vllm``: vLLM.
        engine_options: arguments of `vllm.LLM`, such as ``{"tensor_parallel_size": 8}``.
        tp: how many processes hold one copy of the model together, each a part of every layer, as torchrun starts them.
        ray: the workers of engine ``ray``.
    """

    model: ModelSource
    data: tuple[str, ...]
    out: Path
    layer_ids: tuple[int, ...] | None = None
    convention: Convention = "layer_output"
    ids_of: str | None = None
    draft_config: Path | None = None
    algorithm: Algorithm | None = None
    adapter: str | None = None
    final: Final = "pre"
    head: bool = False
    top_logits: int = 0
    text: TextSettings = TextSettings()
    store_dtype: str | None = None
    batch_tokens: int | None = None
    exact: bool = False
    compile: CompileMode = "auto"
    shard_rows: int = 262_144
    on_bad_values: OnBadValues = "reject"
    force: bool = False
    engine: EngineName = "hf"
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    tp: int = 1
    ray: RayWorkers = RayWorkers()

    def __post_init__(self) -> None:
        object.__setattr__(self, "out", Path(self.out))
        self.layers  # noqa: B018 - says whether the layers are named in one way
        if not self.data:
            raise UsageError("no data was given; expected at least one file or data set.")
        if self.store_dtype is not None and self.store_dtype not in STORE_DTYPES:
            raise UsageError(f"store_dtype must be one of {', '.join(STORE_DTYPES)}; got {self.store_dtype!r}.")
        if self.engine not in get_args(EngineName):
            raise UsageError(f"engine must be one of {', '.join(get_args(EngineName))}; got {self.engine!r}.")
        if self.engine_options and self.engine != "vllm":
            raise UsageError(
                f"engine options ({', '.join(self.engine_options)}) are for the engine vllm; got {self.engine!r}."
            )
        if self.on_bad_values not in get_args(OnBadValues):
            raise UsageError(f"on_bad_values must be reject, raise or keep; got {self.on_bad_values!r}.")
        for name in ("batch_tokens", "shard_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1; got {value}.")
        if self.exact and self.batch_tokens is not None:
            raise UsageError(
                "exact runs one sample a forward, so batch_tokens (--batch-tokens) has no meaning beside it; give "
                "one of them."
            )
        if self.top_logits < 0:
            raise UsageError(f"top_logits must be at least 0; got {self.top_logits}.")
        if self.compile not in get_args(CompileMode):
            raise UsageError(f"compile must be one of {', '.join(get_args(CompileMode))}; got {self.compile!r}.")
        if self.tp < 1:
            raise UsageError(f"tp must be at least 1; got {self.tp}.")
        if self.tp > 1 and self.engine != "hf":
            raise UsageError(
                f"tp spreads a Hugging Face model; the engine {self.engine} has options of its own for it."
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

    @property
    def layers(self) -> LayerChoice:
        return LayerChoice(self.layer_ids, self.convention, self.ids_of, self.draft_config, self.algorithm)

    def taps(self, n: int) -> Taps:
        """The taps in a model of n layers; raises as `LayerChoice.boundaries` does."""
        return Taps(self.layers.boundaries(n), self.final)

    def tap_names(self, taps: Taps) -> tuple[str, ...]:
        """The taps in the words of the ids that were asked for, in slot order."""
        ids, convention = self.layers.told(taps.boundaries)
        word = "layer" if convention == "layer_output" else "boundary"
        return tuple(f"{word} {i}" for i in ids) + taps.names[len(ids) :]
