"""Where a training stands: weights and optimizer moments as safetensors, numbers as JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

TENSORS, NUMBERS = "state.safetensors", "state.json"


def save_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, numbers: dict[str, Any]) -> None:
    """Replace `folder` by the state of now; an interrupted save leaves the older one."""
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    tensors = {f"model.{name}": value.detach().contiguous() for name, value in model.state_dict().items()}
    save_file(tensors | _moments(model, optimizer), fresh / TENSORS)
    (fresh / NUMBERS).write_text(json.dumps(numbers, sort_keys=True), encoding="utf-8")
    older = folder.with_name(folder.name + ".old")
    if folder.exists():
        folder.rename(older)
    fresh.rename(folder)
    shutil.rmtree(older, ignore_errors=True)


def load_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Bring model and optimizer to the saved state and return the numbers; ClickException where there is none."""
    if not (folder / NUMBERS).exists():
        raise click.ClickException(f"{folder} holds no training to go on with; start one without --resume.")
    numbers: dict[str, Any] = json.loads((folder / NUMBERS).read_text(encoding="utf-8"))
    tensors = load_file(folder / TENSORS)
    prefix = "model."
    model.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
    for name, parameter in model.named_parameters():
        if f"step.{name}" in tensors:
            optimizer.state[parameter] = {key: tensors[f"{key}.{name}"] for key in ("step", "exp_avg", "exp_avg_sq")}
    return numbers


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{key}.{name}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
