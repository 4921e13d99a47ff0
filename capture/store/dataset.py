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
from .columns import FINISH, FINISH_REASONS
from .description import ShardDescription
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
    there (pre_norm and post_norm (S, H), output_ids (S,), ...), sample_id and source as text, line; of a generation the
    finish_reason too: stop_token, stop_string, length (the answer was cut), abort or refused. Rejected samples
    have no place; the others keep their input order. Tensors own their memory. Works in DataLoader workers, forked or
    spawned. Keeps 32 bytes per sample in memory and at most 128 files open.

    Args:
        path: the folder, or the shard file.
        allow_incomplete: take the sealed shards of a capture that is still running or was stopped, all of which must be whole.
        check: verify the checksums of every sample that is read; ShardError where its bytes changed on disk. It costs a
            quarter (H = 4096) to six tenths (H = 576) of a loader's time, so it is off: `hiddentap verify` checks all.

    Attributes:
        places: which shard each sample is in, and where.

    Raises:
        UsageError: there is no such path, or it is a folder that no capture filled.
        RunError: an incomplete capture otherwise; `ShardError` for a damaged shard.

    Example:
        >>> dataset = CapturedDataset("OUT")
        >>> len(dataset), dataset[0]["sample_id"], dataset[0]["aux_hidden_states"].shape
        (5, 'a', torch.Size([53, 3, 32]))
        >>> batch = next(iter(torch.utils.data.DataLoader(dataset, batch_size=2, collate_fn=dataset.collate)))
        >>> batch["aux_hidden_states"].shape, batch["lengths"]
        (torch.Size([2, 53, 3, 32]), tensor([53, 30]))
    """

    def __init__(self, path: str | Path, *, allow_incomplete: bool = False, check: bool = False) -> None:
        self.path = Path(path)
        self.check = check
        self.places = SamplePlaces(_open_shards(self.path, allow_incomplete))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return (M,) int64: rows of each sample."""
        return self.places.lengths

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        shard, position = self.places.locate(index)
        item: dict[str, Any] = dict(shard.sample(position, check=self.check))
        item["input_ids"] = item["input_ids"].long()
        if FINISH in item:
            item["finish_reason"] = FINISH_REASONS[int(item.pop(FINISH)[-1])]
        item["sample_id"] = shard.samples.id(position)
        item["source"] = shard.samples.source(position)
        item["line"] = int(shard.samples.line[position])
        return item

    @property
    def metadata(self) -> dict[str, Any]:
        """Return the first shard's record of model, taps and mode; {} without shards."""
        shards = self.places.shards
        return shards[0].metadata if shards else {}

    @property
    def description(self) -> ShardDescription:
        """Return `metadata` as a description of the rows."""
        return ShardDescription.from_json(self.metadata)

    def index_of(self, sample_id: str) -> int:
        """Return the index of the sample with this id.

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
        """Return one batch of `items`, padded on the right to the longest.

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
    folder.require_capture()
    if allow_incomplete:
        found = folder.sealed_shards()
        for error in found.broken.values():
            raise ShardError(
                f"{error} The same capture makes it again; the whole ones can be opened each by its path."
            ) from error
        return list(found.shards.values())
    manifest = Manifest.read(folder.manifest_path)
    if not manifest.complete:
        captured = sum(shard.M for shard in folder.sealed_shards().shards.values())
        raise RunError(
            f"{path}: the capture is not complete ({captured} samples so far). {manifest.way_on} Or pass allow_incomplete=True "
            "to read what is there."
        )
    contradictions = manifest.contradictions()
    if contradictions:
        raise RunError(f"{folder.manifest_path}: {'; '.join(contradictions)}; see `hiddentap verify`.")
    return manifest.open_shards(path)


def _padded(rows: list[torch.Tensor], value: int) -> torch.Tensor:
    longest = max(len(tensor) for tensor in rows)
    batch = rows[0].new_full((len(rows), longest, *rows[0].shape[1:]), value)
    for place, tensor in enumerate(rows):
        batch[place, : len(tensor)] = tensor
    return batch
