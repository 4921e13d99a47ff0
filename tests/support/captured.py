"""Small captured folders, and the states of the model they came from by other means."""

from pathlib import Path

import torch
from torch import Tensor, nn

from hiddentap import CaptureSettings, ModelSource, capture_dataset
from support.model_folder import chat, write_rows

# Near-equal lengths, so that a batched run has batches of several samples; two shards of three samples.
CHATS = [chat(f"How far is town {i}?", f"About {i * 7 + 10} miles by road.", id=f"s{i}") for i in range(6)]
LAYERS = (0, 1, 3)
FIRST, SECOND = "shard-000000.safetensors", "shard-000001.safetensors"


def captured(model: Path, folder: Path, *, data: Path | None = None, **fields: object) -> Path:
    """Capture CHATS, or `data`, from `model` into `folder`; the rows of CHATS are written beside it."""
    rows = data or write_rows(folder.with_suffix(".jsonl"), CHATS)
    given = {"layer_ids": LAYERS, "final": "both", "shard_rows": 200} | fields
    capture_dataset(CaptureSettings(model=ModelSource(str(model)), data=(str(rows),), out=folder, **given))
    return folder


@torch.no_grad()
def plain_states(model: nn.Module, ids: Tensor) -> tuple[Tensor, ...]:
    """Boundaries 0..4 and post-norm of a Llama of 4 layers, (S, H) each."""
    seen = []
    handle = model.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    hs = model(ids[None].long(), output_hidden_states=True, use_cache=False).hidden_states
    handle.remove()
    return tuple(state[0] for state in (*hs[:4], seen[0], hs[4]))
