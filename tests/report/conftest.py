"""Small folders that look like captures of an ordinary model, each spoilt in one way."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from hiddentap.capture.store import Column, GrowingShardWriter, Manifest, OutputFolder

H = 16
LENGTHS = (9, 20, 31, 14, 40, 25, 18, 33, 12, 27, 22, 36)
Columns = dict[str, torch.Tensor]
Spoil = Callable[[Columns, int], None]
ABOUT = {
    "model": {"id": "toy", "class": "Toy"},
    "taps": {
        "layer_ids": [1, 4, 7], "boundaries": [2, 5, 8], "convention": "layer_output", "num_hidden_layers": 9,
        "hidden_size": H,
    },
    "tokenisation": {"max_length": 64},
    "store_dtype": "float32", "compute_dtype": "float32", "mode": "batched",
}  # fmt: skip


def sample_columns(S: int, seed: int) -> Columns:
    """Rows that grow from layer to layer; the first token is far larger than the rest in one dimension."""
    rng = np.random.default_rng(seed)
    states = [rng.normal(size=(S, H))]
    for scale in (1.5, 3.0, 6.0):
        states.append(states[-1] + scale * rng.normal(size=(S, H)))
    rows = np.stack(states, axis=1)
    rows[0, :, 3] += 500.0
    return {
        "aux_hidden_states": torch.from_numpy(rows[:, :3]).float(),
        "pre_norm": torch.from_numpy(rows[:, 3]).float(),
        "input_ids": torch.from_numpy(rng.permutation(1000)[:S]).int(),
        "loss_mask": (torch.arange(S) >= S // 2).to(torch.uint8),
    }


@pytest.fixture(scope="session")
def folder_in() -> Callable[..., Path]:
    """Write a folder into the one given; `spoil` changes the columns of each sample before they are written."""

    def make(
        parent: Path,
        spoil: Spoil = lambda columns, number: None,
        *,
        name: str = "out",
        lengths: tuple[int, ...] = LENGTHS,
        per_shard: int = 6,
        about: dict[str, object] = ABOUT,
        complete: bool = True,
        rejected: int = 0,
    ) -> Path:
        folder = OutputFolder(parent / name)
        folder.shards.mkdir(parents=True)
        shards = []
        for index, first in enumerate(range(0, len(lengths), per_shard)):
            samples = [sample_columns(S, first + place) for place, S in enumerate(lengths[first : first + per_shard])]
            for place, columns in enumerate(samples):
                spoil(columns, first + place)
            shards.append(_write(folder.shard_path(index), samples, first, about, rejected if index == 0 else 0))
        folder.write_rejects([reject for shard in shards for reject in shard.rejects])
        Manifest.from_shards({}, {}, shards, complete=complete).write(folder.manifest_path)
        return folder.path

    return make


@pytest.fixture
def make_folder(folder_in: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """`folder_in` the test's own folder."""
    return partial(folder_in, tmp_path)


def _write(path: Path, samples: list[Columns], first: int, about: dict[str, object], rejected: int):
    columns = [
        Column(name, tensor.dtype, tuple(tensor.shape[1:]), "sampling_mask" if name == "sampling_mask_ids" else "rows")
        for name, tensor in samples[0].items()
    ]
    with GrowingShardWriter(path, columns, about) as writer:
        for place, tensors in enumerate(samples):
            writer.append(writer.begin(first + place, f"s{first + place}", "data.jsonl", first + place + 1), tensors)
        for number in range(rejected):
            handle = writer.begin(1000 + number, f"bad{number}", "data.jsonl", 1000 + number)
            writer.reject(handle, "the answer was empty", {"code": "empty_answer"})
        return writer.seal()
