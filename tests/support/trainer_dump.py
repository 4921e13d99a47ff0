"""A tiny target of 8 layers and H = 32, its capture, and what a plain forward of it gives."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hiddentap.capture.run import CaptureSettings, capture_dataset
from hiddentap.models.loading import ModelSource
from support.model_folder import VOCAB, llama_folder, write_rows

N, H = 8, 32
LONG_ID = "x" * 300
MASKS = {
    "../../etc/passwd": [0, 0, 1, 1, 1, 1, 1],
    "a/b c": [0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1],
    "one": [0, 0, 0, 1, 0],
    LONG_ID: [0] * 10 + [1] * 13,
    "apart": [0, 1, 0, 1, 0, 1],
}
"""Loss mask by sample id, in input order; "one" has a single supervised token, "apart" no two side by side."""
IDS = list(MASKS)
CONSECUTIVE = [IDS[0], IDS[1], IDS[3]]


@dataclass(frozen=True)
class Expected:
    """One sample as a plain forward of the model sees it.

    Attributes:
        states: (n+1, S, H), the residual stream after 0..n layers. post: (S, H), after the final norm. logits: (S, V).
    """

    sample_id: str
    input_ids: Tensor
    loss_mask: Tensor
    states: Tensor
    post: Tensor
    logits: Tensor

    @property
    def S(self) -> int:
        return len(self.input_ids)

    @property
    def pre(self) -> Tensor:
        return self.states[N]

    def side_by_side(self, *boundaries: int) -> Tensor:
        """(S, L * H)"""
        return torch.cat([self.states[b] for b in boundaries], -1)


def token_ids(sample_id: str) -> list[int]:
    """Fixed ids for a sample, the first always 7."""
    generator = torch.Generator().manual_seed(IDS.index(sample_id))
    return [7, *torch.randint(8, VOCAB, (len(MASKS[sample_id]) - 1,), generator=generator).tolist()]


def write_data(path: Path) -> Path:
    """The samples as input rows."""
    rows = [{"id": name, "input_ids": token_ids(name), "loss_mask": mask} for name, mask in MASKS.items()]
    return write_rows(path, rows)


def make_target(folder: Path, **fields: Any) -> Path:
    return llama_folder(folder, num_hidden_layers=N, **fields)


def capture(
    target: Path, data: Path, out: Path, layer_ids: tuple[int, ...], dtype: str = "bfloat16", **more: Any
) -> Path:
    """Rows bit-equal to a plain forward's, in two shards whose order is not that of the input."""
    settings = CaptureSettings(
        ModelSource(str(target), dtype=dtype), (str(data),), out, layer_ids, exact=True, shard_rows=30,
        **({"head": True} | more),
    )  # fmt: skip
    capture_dataset(settings)
    return out


@torch.no_grad()
def plain_forward(target: Path, dtype: torch.dtype) -> list[Expected]:
    """What transformers itself gives for each sample."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype).eval()
    entered: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, args: entered.append(args[0][0]))
    expected = []
    for name, mask in MASKS.items():
        ids = torch.tensor(token_ids(name))
        output = model(ids[None], output_hidden_states=True, use_cache=False)
        states = torch.stack([*(state[0] for state in output.hidden_states[:N]), entered.pop()])
        expected.append(Expected(name, ids, torch.tensor(mask), states, output.hidden_states[N][0], output.logits[0]))
    return expected


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
