"""Captured samples as a torch dataset: dense, in input order, each item read straight from its shard."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from ...models.errors import RunError, UsageError
from .errors import ShardError
from .folder import OutputFolder
from .manifest import Manifest
from .sample_places import SamplePlaces
from .samples import encode_id
from .shard import Shard, open_and_close

_RAGGED = "sampling_mask_ids"
_PADDING = {"output_ids": -1, "sampling_mask_lengths": -1}


class CapturedDataset(Dataset[dict[str, Any]]):
    """The captured samples of an output folder, or of one shard file.

    `[i]` is a dict: input_ids (S,) int64, loss_mask (S,) uint8, aux_hidden_states (S, K, H), every other column that is
    there (pre_norm and post_norm (S, H), output_ids (S,), ...), sample_id and source as text, line. Rejected samples
    have no place; the others keep their input order. Tensors own their memory. Works in DataLoader workers, forked or
    spawned. Keeps 32 bytes per sample in memory and at most 128 files open.

    Args:
        allow_incomplete: take the sealed shards of a capture that is still running or was stopped, all of which must be whole.

    Attributes:
        places: which shard each sample is in, and where.

    Raises:
        RunError: an incomplete capture otherwise; `ShardError` for a damaged shard.
    """

    def __init__(self, path: str | Path, *, allow_incomplete: bool = False) -> None:
        self.path = Path(path)
        self.places = SamplePlaces(_open_shards(self.path, allow_incomplete))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(M,) int64: rows of each sample."""
        return self.places.lengths

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        shard, position = self.places.locate(index)
        item: dict[str, Any] = dict(shard.sample(position))
        item["input_ids"] = item["input_ids"].long()
        item["sample_id"] = shard.samples.id(position)
        item["source"] = shard.samples.source(position)
        item["line"] = int(shard.samples.line[position])
        return item

    @property
    def metadata(self) -> dict[str, Any]:
        """What the first shard says about model, taps and mode; {} without shards."""
        shards = self.places.shards
        return shards[0].metadata if shards else {}

    def index_of(self, sample_id: str) -> int:
        """The index of the sample with this id.

        Raises KeyError if no captured sample has it, UsageError if several have, saying how many.
        """
        hashes, order = self._id_hashes
        wanted = hash(encode_id(sample_id))
        first, last = np.searchsorted(hashes, wanted), np.searchsorted(hashes, wanted, side="right")
        found = [int(i) for i in order[first:last] if self._id(int(i)) == sample_id]
        if not found:
            raise KeyError(sample_id)
        if len(found) > 1:
            raise UsageError(f"{len(found)} samples have the id {sample_id!r}: {found[:5]}; use their indices.")
        return found[0]

    @staticmethod
    def collate(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Items -> one batch, padded on the right to the longest.

        Row tensors become (B, S, ...), padded with 0 (-1 where -1 means absent); added: lengths (B,) int64 and
        attention_mask (B, S) int64. Text, lines and the flat sampling-mask ids stay lists.
        """
        lengths = torch.tensor([len(item["input_ids"]) for item in items])
        batch: dict[str, Any] = {}
        for name, first in items[0].items():
            values = [item[name] for item in items]
            if isinstance(first, torch.Tensor) and name != _RAGGED:
                batch[name] = _padded(values, _PADDING.get(name, 0))
            else:
                batch[name] = values
        batch["lengths"] = lengths
        batch["attention_mask"] = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        return batch

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        # Text hashes differ between processes.
        state.pop("_id_hashes", None)
        return state

    @cached_property
    def _id_hashes(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sorted hashes of all ids and the index of each: 16 bytes per sample, where a dict takes hundreds."""
        hashes = np.fromiter((hash(encode_id(self._id(i))) for i in range(len(self))), np.int64, len(self))
        order = np.argsort(hashes, kind="stable")
        return hashes[order], order

    def _id(self, index: int) -> str:
        shard, position = self.places.locate(index)
        return shard.samples.id(position)


def _open_shards(path: Path, allow_incomplete: bool) -> list[Shard]:
    if path.is_file():
        return [open_and_close(path)]
    folder = OutputFolder(path)
    if allow_incomplete:
        found = folder.sealed_shards()
        for error in found.broken.values():
            raise ShardError(
                f"{error} The same capture makes it again; the whole ones can be opened each by its path."
            ) from error
        return list(found.shards.values())
    manifest = Manifest.read(folder.manifest_path)
    if not manifest.complete:
        raise RunError(
            f"{path}: the capture is not complete ({manifest.counts.get('captured')} samples so far). "
            "Finish it by running it again, or pass allow_incomplete=True to read what is there."
        )
    return [open_and_close(path / entry.file) for entry in manifest.shards]


def _padded(rows: list[torch.Tensor], value: int) -> torch.Tensor:
    longest = max(len(tensor) for tensor in rows)
    batch = rows[0].new_full((len(rows), longest, *rows[0].shape[1:]), value)
    for place, tensor in enumerate(rows):
        batch[place, : len(tensor)] = tensor
    return batch
