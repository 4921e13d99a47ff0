"""How other tools take hidden states, each written plainly. Nothing here is the project's: torch and transformers alone.

None of the first three writes anything, which is in their favor; rows of a sample end as tensors on the host, and go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

Ids = Sequence[Tensor]  # (S,) int64 each, on the host
Strategy = Callable[[], None]

PADDED = "batches of 16 in file order, padded, mask, hooks"
ONE_BY_ONE = "one by one, all hidden states, cache"
WITH_LOGITS = "one by one, all hidden states, cache, logits"
SAVED = "one by one, all hidden states, cache, torch.save of each"
NAMES = (PADDED, ONE_BY_ONE, WITH_LOGITS, SAVED)
BATCH = 16


def load(name: str, dtype: str, device: torch.device) -> nn.Module:
    """A model of their own: transformers leaves hooks behind on one that was asked for all hidden states."""
    model: nn.Module = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    return model.to(device).eval()


def strategies(model: Any, ids: Ids, layers: Sequence[int], folder: Path) -> dict[str, Strategy]:
    """By name. `layers`: 0-based decoder layers whose output is wanted, beside what enters the final norm."""
    return {
        PADDED: lambda: padded_batches(model, ids, layers),
        ONE_BY_ONE: lambda: one_by_one(model.get_decoder(), ids, layers),
        WITH_LOGITS: lambda: one_by_one(model, ids, layers),
        SAVED: lambda: saved_one_by_one(model.get_decoder(), ids, layers, folder),
    }


class Grab:
    """A hook that keeps the tensor it sees."""

    value: Tensor

    def of_output(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self.value = output if isinstance(output, Tensor) else output[0]

    def of_input(self, _module: nn.Module, args: Any) -> None:
        self.value = args[0]


@torch.no_grad()
def padded_batches(model: Any, ids: Ids, layers: Sequence[int]) -> None:
    """Sixteen samples a forward, as they come, padded to the longest; only the layers that are wanted are kept."""
    decoder = model.get_decoder()
    grabs = [Grab() for _ in range(len(layers) + 1)]
    handles = [
        decoder.layers[i].register_forward_hook(grab.of_output) for i, grab in zip(layers, grabs[:-1], strict=True)
    ]
    handles.append(decoder.norm.register_forward_pre_hook(grabs[-1].of_input))
    try:
        for start in range(0, len(ids), BATCH):
            batch = ids[start : start + BATCH]
            lengths = torch.tensor([len(sample) for sample in batch])
            input_ids = nn.utils.rnn.pad_sequence(list(batch), batch_first=True).to(model.device)
            mask = (torch.arange(input_ids.shape[1]) < lengths[:, None]).long().to(model.device)
            decoder(input_ids=input_ids, attention_mask=mask, use_cache=False)
            states = torch.stack([grab.value for grab in grabs], 2).cpu()
            _ = [states[place, :length].clone() for place, length in enumerate(lengths.tolist())]
    finally:
        for handle in handles:
            handle.remove()


def one_by_one(model: Any, ids: Ids, layers: Sequence[int]) -> None:
    """Every layer's output and a cache of every sample, of which the wanted layers are taken."""
    for sample in ids:
        rows_of(model, sample, layers)


def saved_one_by_one(model: Any, ids: Ids, layers: Sequence[int], folder: Path) -> None:
    """The same, and a file for each sample; nothing makes sure that it reaches the disk."""
    for number, sample in enumerate(ids):
        rows = rows_of(model, sample, layers)
        item = {"input_ids": sample, "loss_mask": torch.ones_like(sample), "hidden_states": rows}
        torch.save(item, folder / f"{number}.pt")


@torch.no_grad()
def rows_of(model: Any, sample: Tensor, layers: Sequence[int]) -> Tensor:
    """(S, K+1, H) on the host; the last one is what transformers gives last, after the final norm."""
    output = model(input_ids=sample[None].to(model.device), output_hidden_states=True, use_cache=True)
    states = output.hidden_states
    return torch.stack([*(states[i + 1][0] for i in layers), states[-1][0]], 1).cpu()
