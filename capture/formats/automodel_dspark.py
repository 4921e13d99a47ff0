"""Automodel's DSpark cache, format version 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .automodel_cache import (
    SHARD_SIZE,
    CacheFiles,
    cache_dtype,
    data_names,
    padded_length,
    shard_path,
    template_sha256,
    write_manifest,
)
from .errors import FormatError
from .final_state import Norm
from .job import ExportJob
from .layout import ForeignSample, Format, Piece, Stated, int64, numbered_shards
from .selection import Rule
from .settings import ExportSettings, ImportSettings
from .taps import output_ids_with_embeddings
from .tensor_file import PaddedTensorFile, write_tensors

NAME = "Automodel's DSpark"
VERSION = 1
AUX, LAST = "target_hidden_states", "target_last_hidden_states"


class DSparkExporter:
    """Shards of (n_s, T, ...) tensors, the target's embeddings and lm_head, a manifest."""

    def __init__(self, job: ExportJob) -> None:
        self._job, self._taps = job, job.captured.taps
        self._ids = output_ids_with_embeddings(self._taps, NAME)
        self._dtype, self._dtype_name = job.captured.dtype, cache_dtype(job)
        self._final = job.final_state("post", NAME)
        if self._taps.has_last:
            job.note(
                f"layer id {self._taps.n - 1} is the last one: {NAME} means its state after the final norm, and gets that"
            )
        self._weights = {
            "embed_tokens.weight": job.head.weight("embeddings", NAME),
            "lm_head.weight": job.head.weight("lm_head", NAME),
        }
        self._shard_size = job.settings.shard_size or SHARD_SIZE

    def pieces(self) -> Iterator[Piece]:
        return numbered_shards(self._job, self._shard_size, lambda shard: shard_path(self._job.dest, shard))

    def write(self, piece: Piece) -> None:
        M, T, H = piece.stop - piece.first, padded_length(self._job), self._taps.H
        shapes = {
            "input_ids": (torch.int64, (M, T)),
            "loss_mask": (torch.int64, (M, T)),
            AUX: (self._dtype, (M, T, self._taps.K * H)),
            LAST: (self._dtype, (M, T, H)),
        }
        with PaddedTensorFile(piece.path, shapes) as file:
            for number in range(piece.first, piece.stop):
                for name, rows in self._rows(number).items():
                    file.write(name, rows, number - piece.first)
            file.seal()

    def finish(self) -> None:
        write_tensors(
            self._job.dest / "target_weights.safetensors",
            {name: weight.to(self._dtype) for name, weight in self._weights.items()},
        )
        write_manifest(self._job.dest, self._manifest())

    def _rows(self, number: int) -> dict[str, Tensor]:
        job = self._job
        aux, last = job.aux(number, self._dtype), job.final(self._final, number, self._dtype)
        if self._taps.has_last:
            aux[:, self._taps.boundaries.index(self._taps.n)] = last
        return {
            "input_ids": int64(job.input_ids(number)),
            "loss_mask": int64(job.loss_mask(number)),
            AUX: aux.flatten(1),
            LAST: last,
        }

    def _manifest(self) -> dict[str, Any]:
        job, taps = self._job, self._taps
        return {
            "format_version": VERSION,
            "complete": True,
            "target_model": job.target_model(),
            "target_model_type": job.head.model_type,
            "target_vocab_size": job.head.vocab_size,
            "hidden_size": taps.H,
            "num_hidden_layers": taps.n,
            "seq_length": padded_length(job),
            "dtype": self._dtype_name,
            "num_samples": len(job),
            "shard_size": self._shard_size,
            "target_hidden_dim": taps.K * taps.H,
            "target_last_hidden_dim": taps.H,
            "target_layer_ids": self._ids,
            "train_data_path": data_names(job),
            "train_split": None,
            "shuffle_seed": 0,
            "mask_reasoning_content": False,
            "chat_template_sha256": template_sha256(job),
        }


class DSparkReader:
    """Samples without their padding.

    The cache says no lengths: rows at the end that are all zero are padding, and so are unsupervised rows at the end with
    the id `pad_id` where that is given. The last layer's states are those after the norm, which `final` holds already.
    """

    final: Norm | None = "post"

    def __init__(self, settings: ImportSettings) -> None:
        self._cache = CacheFiles(settings.folder, VERSION)
        self._pad_id = settings.pad_id
        self._ids = self._cache.layer_ids("target_layer_ids") or tuple(settings.layer_ids or ())
        n = self._cache.entry("num_hidden_layers", int) or settings.n
        self._slots = [slot for slot, i in enumerate(self._ids) if n is None or i != n - 1]
        if self._ids and not self._slots:
            raise FormatError(
                f"the cache holds layer {self._ids[0]} alone, after the final norm, and no layer before it."
            )
        self.stated = Stated(
            layer_ids=tuple(self._ids[slot] for slot in self._slots) or None,
            n=n,
            model=self._cache.entry("target_model", str),
        )

    def __len__(self) -> int:
        return self._cache.samples

    def read(self, number: int) -> ForeignSample:
        ids, mask, aux, last = self._cache.sample(number, "input_ids", "loss_mask", AUX, LAST)
        S = self._length(ids, mask, last)
        if len(self._slots) < len(self._ids):
            aux = aux.view(len(aux), len(self._ids), -1)[:, self._slots].flatten(1)
        return ForeignSample(ids[:S], mask[:S], aux[:S], last[:S])

    def _length(self, ids: Tensor, mask: Tensor, last: Tensor) -> int:
        real = last.ne(0).any(-1)
        if self._pad_id is not None:
            real &= ids.ne(self._pad_id) | mask.ne(0)
        places = real.nonzero()[:, 0]
        return int(places[-1]) + 1 if len(places) else 0


def _rule(settings: ExportSettings) -> Rule:
    return Rule(settings.min_supervised, max_length=settings.seq_length)


AUTOMODEL_DSPARK = Format(
    "automodel-dspark",
    DSparkExporter,
    DSparkReader,
    options=frozenset({"target_model", "seq_length", "shard_size"}),
    rule=_rule,
)
