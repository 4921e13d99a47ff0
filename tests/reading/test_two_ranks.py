"""A data-parallel loop over packs in two processes: it ends, though the packs do not share out evenly."""

import json
from pathlib import Path

import torch
import torch.distributed as dist

from hiddentap import CapturedDataset
from hiddentap.capture.reading import PackedDataset, PackLoader
from support.processes import run_ranks

EPOCHS = 2


def train(rank: int, folder: Path, capture: str, budget: int) -> None:
    """Sum a value over both ranks in each step, as a gradient is: a rank with one step more would wait for the other."""
    packs = PackedDataset(CapturedDataset(capture), budget, rank=rank, world_size=2)
    steps, rows = [], 0
    loader = PackLoader(packs)
    for _ in range(EPOCHS):
        steps.append(0)
        for pack in loader:
            count = torch.tensor(len(pack["input_ids"]))
            dist.all_reduce(count)
            rows += int(count)
            steps[-1] += 1
    (folder / f"rank-{rank}.json").write_text(json.dumps({"steps": steps, "rows": rows}))


def test_a_loop_over_packs_in_two_processes_ends(dataset: CapturedDataset, tmp_path: Path) -> None:
    # Without padding the second rank would end first, and the first would wait for it.
    budget = next(tokens for tokens in range(30, 60) if len(PackedDataset(dataset, tokens)) % 2)
    packs = len(PackedDataset(dataset, budget))
    run_ranks(train, 2, tmp_path, str(dataset.path), budget)
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first["steps"][0] == (packs + 1) // 2
    assert first["rows"] > EPOCHS * int(dataset.lengths.sum())
