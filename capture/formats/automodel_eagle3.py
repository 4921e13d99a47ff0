"""Automodel's EAGLE-3 cache, format version 2: inputs shifted to the left, and the teacher's next-token distribution."""

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
    write_manifest,
)
from .errors import FormatError
from .final_state import Norm
from .job import ExportJob
from .layout import ForeignSample, Format, Piece, Stated, int64, numbered_shards
from .selection import Rule
from .settings import ExportSettings, ImportSettings
from .taps import output_ids, require_three
from .teacher import Teacher, most_likely
from .tensor_file import PaddedTensorFile, Shapes, write_tensors
from .vocabulary import DraftVocabulary

NAME = "Automodel's EAGLE-3"
VERSION = 2
TOKEN_KEYS = ("input_ids", "attention_mask", "loss_mask")


class Eagle3Exporter:
    """Shards of (n_s, T, ...) tensors, the target's embeddings in float32, a manifest."""

    def __init__(self, job: ExportJob) -> None:
        self._job, self._taps = job, job.captured.taps
        self._ids = output_ids(self._taps, NAME)
        require_three(self._taps, NAME)
        self._dtype, self._dtype_name = job.captured.dtype, cache_dtype(job)
        self._final = job.final_state("post", NAME)
        self._teacher = Teacher(job.head.lm_head(f"{NAME} teacher"), job.captured.compute_dtype)
        self._embeddings = job.head.weight("embeddings", NAME)
        self._V = job.vocab_size(NAME)
        D, k = job.D, job.settings.target_probs_topk
        if k is not None and k >= D:
            raise FormatError(
                f"{NAME} keeps fewer than its {D} draft tokens or all of them; got --target-probs-topk {k}."
            )
        self._shard_size = job.settings.shard_size or SHARD_SIZE

    def pieces(self) -> Iterator[Piece]:
        return numbered_shards(self._job, self._shard_size, lambda shard: shard_path(self._job.dest, shard))

    def write(self, piece: Piece) -> None:
        vocabulary = self._job.vocabulary
        with PaddedTensorFile(piece.path, self._shapes(piece.stop - piece.first, vocabulary.D)) as file:
            for number in range(piece.first, piece.stop):
                self._write_sample(file, number - piece.first, number, vocabulary)
            file.seal()

    def finish(self) -> None:
        write_tensors(self._job.dest / "target_embeddings.safetensors", {"weight": self._embeddings.float()})
        write_manifest(self._job.dest, self._manifest(self._job.vocabulary))

    def _shapes(self, M: int, D: int) -> Shapes:
        T, k = padded_length(self._job), self._job.settings.target_probs_topk
        rows: dict[str, tuple[torch.dtype, tuple[int, ...]]] = dict.fromkeys(TOKEN_KEYS, (torch.int64, (M, T)))
        rows["aux_hidden_states"] = (self._dtype, (M, T, 3 * self._taps.H))
        rows["position_mask"] = (torch.bool, (M, T, 1))
        if k is None:
            return rows | {"target_probs": (self._dtype, (M, T, D))}
        return rows | {
            "target_probs_values": (self._dtype, (M, T, k)),
            "target_probs_indices": (torch.int32, (M, T, k)),
        }

    def _write_sample(self, file: PaddedTensorFile, place: int, number: int, vocabulary: DraftVocabulary) -> None:
        job, S = self._job, self._job.length(number)
        loss_mask = _shifted(int64(job.loss_mask(number)))
        file.write("input_ids", _shifted(int64(job.input_ids(number))), place)
        file.write("attention_mask", torch.ones(S, dtype=torch.int64), place)
        file.write("loss_mask", loss_mask, place)
        file.write("aux_hidden_states", job.flat_aux(number, self._dtype), place)
        # Shifted too: place t holds what row t + 1 says, and the last place nothing.
        teacher_rows, t = job.final(self._final, number, self._dtype)[1:], 0
        for probabilities, sayable in self._teacher.chunks(teacher_rows, vocabulary):
            self._write_probabilities(file, probabilities, place, t)
            mask = (sayable & loss_mask[t : t + len(sayable)].bool())[:, None]
            file.write("position_mask", mask, place, t)
            t += len(sayable)

    def _write_probabilities(self, file: PaddedTensorFile, probabilities: Tensor, place: int, t: int) -> None:
        k = self._job.settings.target_probs_topk
        if k is None:
            file.write("target_probs", probabilities.to(self._dtype), place, t)
            return
        values, places = most_likely(probabilities, k)
        file.write("target_probs_values", values.to(self._dtype), place, t)
        file.write("target_probs_indices", places, place, t)

    def _manifest(self, vocabulary: DraftVocabulary) -> dict[str, Any]:
        job = self._job
        return {
            "format_version": VERSION,
            "target_model": job.target_model(),
            "target_vocab_size": self._V,
            "draft_vocab_size": vocabulary.D,
            "seq_length": padded_length(job),
            "dtype": self._dtype_name,
            "num_samples": len(job),
            "shard_size": self._shard_size,
            "target_probs_topk": job.settings.target_probs_topk or 0,
            "aux_hidden_dim": 3 * self._taps.H,
            "aux_layer_ids": self._ids,
            "selected_token_ids": vocabulary.token_ids.tolist(),
            "input_data": data_names(job),
            "split": None,
            "shuffle_seed": 0,
        }


class Eagle3Reader:
    """Samples shifted back. The layout lost their first token, and its mask: the token must be given, the mask is 0."""

    final: Norm | None = None

    def __init__(self, settings: ImportSettings) -> None:
        self._cache = CacheFiles(settings.folder, VERSION)
        if settings.first_token is None:
            raise FormatError(
                f"{NAME} cache holds its inputs shifted to the left, without the first token of each sample; "
                "give it by --first-token ID (for many models the id of the begin-of-text token)."
            )
        self._first = settings.first_token
        self.stated = Stated(
            layer_ids=self._cache.layer_ids("aux_layer_ids") or None, model=self._cache.entry("target_model", str)
        )

    def __len__(self) -> int:
        return self._cache.samples

    def read(self, number: int) -> ForeignSample:
        ids, attention, mask, aux = self._cache.sample(
            number, "input_ids", "attention_mask", "loss_mask", "aux_hidden_states"
        )
        S = int(attention.sum())
        return ForeignSample(_unshifted(ids[:S], self._first), _unshifted(mask[:S], 0), aux[:S], None)


def _shifted(values: Tensor) -> Tensor:
    """Return (S,): what place t + 1 holds, at place t; 0 at the last."""
    return torch.cat([values[1:], values.new_zeros(1)])


def _unshifted(values: Tensor, first: int) -> Tensor:
    return torch.cat([values.new_full((1,), first), values[:-1]])


def _rule(settings: ExportSettings) -> Rule:
    return Rule(settings.min_supervised, max_length=settings.seq_length)


AUTOMODEL_EAGLE3 = Format(
    "automodel-eagle3",
    Eagle3Exporter,
    Eagle3Reader,
    options=frozenset(
        {
            "target_model",
            "target_vocab_size",
            "draft_vocab_size",
            "draft_vocab",
            "target_probs_topk",
            "seq_length",
            "shard_size",
        }
    ),
    rule=_rule,
)
