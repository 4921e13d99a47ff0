"""Rows of a model whose layers are read while it runs, beside rows of the same checkpoint in memory, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from hiddentap import CaptureSettings, HiddentapError, ModelSource
from hiddentap.capture.run.batches import BatchRule, Place, SampleRows, TokenBatch
from hiddentap.capture.run.distributed.ranks import Ranks
from hiddentap.capture.run.engines.hugging_face.backend import KIND
from hiddentap.models.length_limits import NO_LIMITS, LengthLimits
from support import architectures
from support.recorder import equal

LENGTHS = (6, 9, 9, 14)
ALONE, TOGETHER = 1, 64  # positions of a batch: one sample each, all samples in one

Rows = list[dict[str, Tensor]]


@dataclass(frozen=True)
class Streamed:
    """What came of one model.

    Attributes:
        kind: equal | different | refused (with the error of this package in `detail`) | cannot run (the saved model in memory
            gives no rows either, or it cannot be saved).
    """

    kind: Literal["equal", "different", "refused", "cannot run"]
    detail: str = ""


def streamed(model: nn.Module, folder: Path, layer_ids: Sequence[int], **asked: Any) -> Streamed:
    """Save `model` in `folder` and compare its streamed rows with those of it in memory.

    Samples run one by one, as `--exact` runs them, and all in one batch; both kinds of run get the same batches.

    Args:
        layer_ids: what is tapped, of ``layer_output``.
        asked: more of `CaptureSettings`, such as `final` and `adapter`.
    """
    try:
        model.save_pretrained(folder)
        expected = rows_of(settings(folder, layer_ids, **asked))
    except Exception as failed:  # noqa: BLE001 - whatever keeps it from being loaded as ordinary models are
        return Streamed("cannot run", f"{type(failed).__name__}: {failed}")
    try:
        found = rows_of(settings(folder, layer_ids, stream_weights=True, **asked))
    except HiddentapError as refused:
        return Streamed("refused", str(refused))
    unlike = [
        f"{name} of batch {i}" for i, (a, b) in enumerate(zip(expected, found, strict=True)) for name in unequal(a, b)
    ]
    return Streamed("different", ", ".join(unlike)) if unlike else Streamed("equal")


def settings(folder: Path, layer_ids: Sequence[int], **asked: Any) -> CaptureSettings:
    source = ModelSource(str(folder), device="cpu")
    return CaptureSettings(
        source, ("none.jsonl",), folder / "out", layer_ids=list(layer_ids), **{"exact": True, **asked}
    )


def rows_of(asked: CaptureSettings) -> Rows:
    """The columns of every batch: samples one by one, then together."""
    with redirect_stderr(StringIO()):  # transformers' bars
        backend = KIND.backend(asked, Ranks())
    limits = backend.attached.limits
    batches = [*batches_of(ALONE, limits), *batches_of(TOGETHER, limits)]
    with backend.engine(torch.float32, max(LENGTHS)) as engine:
        if asked.stream_weights:
            outputs = engine.forwards(batches, check_stop=lambda: None)
        else:
            outputs = [engine.forward(batch) for batch in batches]
    return [dict(output.outputs[0].columns) for output in outputs]


def batches_of(positions: int, limits: LengthLimits = NO_LIMITS) -> list[TokenBatch]:
    """Samples of `LENGTHS` tokens in batches of up to `positions`, as far as the model's `limits` let them share one."""
    ids = [architectures.token_ids(1, length, seed=7 + i)[0].to(torch.int32) for i, length in enumerate(LENGTHS)]
    offsets = np.cumsum([0, *LENGTHS], dtype=np.int64)
    rows = SampleRows([str(i) for i in range(len(LENGTHS))], offsets, torch.cat(ids))
    cut, place = [], Place(0)
    while place.sample < rows.M:
        cut.append(rows.batch(place, positions, BatchRule(most_padding=1.0, limits=limits)))
        place = cut[-1].next
    return cut


def unequal(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    return [
        name for name in sorted(a.keys() | b.keys()) if name not in a or name not in b or not equal(a[name], b[name])
    ]
