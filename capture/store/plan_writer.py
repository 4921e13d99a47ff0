"""The plan on its way to disk: samples streamed in while they are tokenized."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...models.errors import UsageError
from ..rejects import Reject
from .diskio import write_atomically
from .plan import IMAGE_TENSORS, PLAN_FILE, PLAN_TENSORS, Plan, plan_file
from .plan_extra import PlanExtra
from .record import record_bytes, sorted_json
from .samples import encode_id
from .tensorfile import TensorFileWriter, numpy_dtype
from .version import PLAN_VERSION

Ids = torch.Tensor | NDArray[np.generic] | Sequence[int]


class PlanWriter:
    """Writes a plan folder: `with PlanWriter(folder) as writer: writer.add(...); writer.seal(...)`.

    Memory stays at a few buffers whatever the number of samples. `plan.json` comes last: without it the folder is no
    plan. Leaving without `seal` removes what was written; what a killed writer left is replaced.

    folder: created if missing. Raises UsageError if it holds a sealed plan.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, TensorFileWriter] = {}
        self._sealed = False
        self.samples = 0
        self.rows = 0
        self._rejected = 0
        self._id_bytes = self._image_bytes = 0
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / PLAN_FILE).exists():
            raise UsageError(f"{folder} holds a sealed plan; open it with Plan, or remove it to make another.")
        remove_plan_files(folder)
        try:
            for name, dtype in PLAN_TENSORS.items():
                self._tensors[name] = TensorFileWriter(plan_file(folder, name), dtype)
        except BaseException:
            self._discard()
            raise
        self._append("sample_id_offsets", 0)

    def add(
        self,
        input_ids: Ids,
        loss_mask: Ids,
        *,
        sample_id: str,
        source: int,
        line: int,
        truncated_from: int = 0,
        images: Mapping[str, Any] | None = None,
    ) -> None:
        """Append one sample; its index is how many were added before.

        input_ids: (S,) integers in 0 .. 2**31 - 1, S >= 1; loss_mask: (S,) of 0 and 1, or booleans.
        source: index into the sources given at the seal; line: counted from 1.
        truncated_from: tokens before truncation, 0 if it was not truncated.
        images: JSON values of the caller's of a sample with images; `placeholders` in it, (start, stop) pairs, are the rows that
        hold image features.
        """
        encoded = encode_id(sample_id)
        ids = _integers(input_ids, "input_ids", sample_id, np.iinfo(np.int32).max)
        mask = _integers(loss_mask, "loss_mask", sample_id, 1)
        if len(ids) == 0 or len(ids) != len(mask):
            lengths = f"{len(ids)} and {len(mask)}"
            raise UsageError(f"sample {sample_id!r}: input_ids and loss_mask need one length >= 1, got {lengths}.")
        self._id_bytes += len(encoded)
        self._tensors["input_ids"].append(ids.astype(np.int32).tobytes())
        self._tensors["loss_mask"].append(mask.astype(np.uint8).tobytes())
        self._tensors["sample_ids"].append(encoded)
        self._append("lengths", len(ids))
        self._append("sample_id_offsets", self._id_bytes)
        self._append("source_index", source)
        self._append("source_line", line)
        self._append("truncated_from", truncated_from)
        if images is not None:
            self._append_images(sorted_json(images, "the images of a sample").encode())
        self.samples += 1
        self.rows += len(ids)

    def reject(self, reject: Reject) -> None:
        """Keep the reason why an input row never became a sample."""
        line = sorted_json(reject.as_json(), "a reject's detail") + "\n"
        self._tensors["rejects"].append(line.encode())
        self._rejected += 1

    def rejects(self) -> list[Reject]:
        """Return the rejects so far, for a run that ends before its plan is sealed."""
        return [Reject.from_json(json.loads(line)) for line in self._tensors["rejects"].written().splitlines()]

    def seal(
        self,
        identity: Mapping[str, Any],
        sources: Sequence[str],
        *,
        shard_rows: int = 262_144,
        extra: PlanExtra | None = None,
    ) -> Plan:
        """Make the plan readable and open it; the writer is done.

        identity: what must be equal for this plan to be used again. sources: names by source index.
        shard_rows: rows of a shard at most. extra: counts and hashes of the samples together.
        """
        summary = {
            "format_version": PLAN_VERSION,
            "identity": dict(identity),
            "sources": list(sources),
            "shard_rows": shard_rows,
            "extra": (extra or PlanExtra()).as_json(),
            "rejected": self._rejected,
        }
        sorted_json(summary, "the plan's identity and extra")
        if shard_rows < 1:
            raise UsageError(f"shard_rows must be at least 1, got {shard_rows}.")
        summary["files"] = {name: writer.seal() for name, writer in self._tensors.items()}
        write_atomically(self._folder / PLAN_FILE, record_bytes(summary, "the plan's identity and extra"))
        self._sealed = True
        return Plan(self._folder)

    def __enter__(self) -> "PlanWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._discard()

    def _append_images(self, encoded: bytes) -> None:
        if "images" not in self._tensors:
            for name, dtype in IMAGE_TENSORS.items():
                self._tensors[name] = TensorFileWriter(plan_file(self._folder, name), dtype)
            self._append("image_offsets", 0)
        self._tensors["images"].append(encoded)
        self._image_bytes += len(encoded)
        self._append("image_samples", self.samples)
        self._append("image_offsets", self._image_bytes)

    def _append(self, name: str, value: int) -> None:
        dtype = numpy_dtype(PLAN_TENSORS[name] if name in PLAN_TENSORS else IMAGE_TENSORS[name])
        limits = np.iinfo(dtype)
        if not 0 <= value <= limits.max:
            raise UsageError(f"{name} must be in 0..{limits.max}, got {value}.")
        self._tensors[name].append(int(value).to_bytes(dtype.itemsize, "little"))

    def _discard(self) -> None:
        if not self._sealed:
            for writer in self._tensors.values():
                writer.discard()
            remove_plan_files(self._folder)


def remove_plan_files(folder: Path) -> list[Path]:
    """Remove what a plan writer leaves without its `plan.json`; returns what was there. Other files stay."""
    found = [path for path in plan_leftovers(folder) if path.exists()]
    for path in found:
        path.unlink()
    return found


def plan_leftovers(folder: Path) -> list[Path]:
    """Return every path that a plan writer uses, except `plan.json`."""
    tensors = [plan_file(folder, name) for name in (*PLAN_TENSORS, *IMAGE_TENSORS)]
    unsealed = [path.with_name(path.name + ".open") for path in tensors]
    return [*tensors, *unsealed, folder / (PLAN_FILE + ".tmp")]


def _integers(values: Ids, what: str, sample_id: str, largest: int) -> NDArray[np.int64]:
    array = values.numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if array.ndim != 1 or (array.dtype.kind not in "iub" and len(array)):
        raise UsageError(f"sample {sample_id!r}: {what} must be one row of integers, got {array.dtype} {array.shape}.")
    if len(array) and (int(array.min()) < 0 or int(array.max()) > largest):
        raise UsageError(
            f"sample {sample_id!r}: {what} must lie in 0..{largest}, found {int(array.min())}..{int(array.max())}."
        )
    return array
