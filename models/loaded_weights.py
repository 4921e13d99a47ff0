"""A loaded model beside the checkpoint it came from: what is missing, what was left over, what the config says otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from .checkpoint import CheckpointError
from .decoder import DecoderNotFoundError, find_decoder
from .errors import UsageError
from .modules import address
from .published_form import is_companion


def require_whole(model: nn.Module, missing: Iterable[str], name: str) -> None:
    """Raise CheckpointError where weights of `model` are in no file; `missing`: those that transformers did not find."""
    random = _untied(model, list(missing))
    if random:
        raise CheckpointError(
            f"{len(random)} weights of {type(model).__name__} are not in {name} and would be random: "
            f"{', '.join(random[:5])}{' ...' if len(random) > 5 else ''}. The checkpoint is incomplete or of another model."
        )


def require_used(model: nn.Module, unexpected: Iterable[str], name: str) -> list[str]:
    """Return a note on the stored weights that have no place in `model`.

    Raises:
        CheckpointError: some belong to one of its decoder layers, which would compute without them.
    """
    left = sorted(key for key in unexpected if not is_companion(key))
    layers = _layer_prefixes(model)
    inside = [key for key in left if key.endswith((".weight", ".bias")) and key.startswith(layers)]
    if inside:
        raise CheckpointError(
            f"{len(inside)} weights in {name} belong to decoder layers of {type(model).__name__}, which has no place for them: "
            f"{', '.join(inside[:3])}. The layers would compute without them: the config is of another model, "
            "or a setting of it is wrong (attention_bias and the like)."
        )
    if not left:
        return []
    return [f"{len(left)} weights of the checkpoint have no place in {type(model).__name__}: {', '.join(left[:3])}"]


def disagreements(model: nn.Module, config: Any, *, dtype_is_open: bool) -> list[str]:
    """Return what the config says otherwise than the loaded weights, in words.

    dtype_is_open: nobody asked for a dtype, so the config's should be that of the weights.
    """
    notes = []
    stated, found = getattr(config, "dtype", None), main_dtype(model)
    if dtype_is_open and isinstance(stated, torch.dtype) and str(stated).removeprefix("torch.") != found:
        notes.append(f"the config says {stated} and most weights are {found}")
    tied, says_tied = _is_tied(model), bool(getattr(config, "tie_word_embeddings", False))
    if tied is not None and tied != says_tied:
        notes.append(
            f"the config says tie_word_embeddings={says_tied}, but head and embeddings are {'one' if tied else 'two'} in memory"
        )
    return notes


def main_dtype(model: nn.Module) -> str:
    """Return the dtype of most of a model's parameters, such as ``bfloat16``."""
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return str(max(counts, key=lambda d: counts[d])).removeprefix("torch.") if counts else "none"


def _layer_prefixes(model: nn.Module) -> tuple[str, ...]:
    """Return the prefixes of its decoder layers' weight names, with and without the base model's prefix."""
    try:
        decoder = find_decoder(model)
    except (DecoderNotFoundError, UsageError):  # whoever taps the model hears of it
        return ()
    paths = {decoder.layers_path, decoder.layers_path.removeprefix(f"{getattr(model, 'base_model_prefix', '')}.")}
    return tuple(f"{path}.{k}." for path in paths for k in range(decoder.n))


def _untied(model: nn.Module, keys: Sequence[str]) -> list[str]:
    """Return those of `keys` whose storage no loaded weight shares: tying is read from storage, not from the config."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    absent = set(keys)
    loaded = {address(t) for name, t in tensors.items() if name not in absent and t.device.type != "meta"}
    return sorted(name for name in absent if name in tensors and address(tensors[name]) not in loaded)


def _is_tied(model: Any) -> bool | None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if getattr(embedding, "weight", None) is None or getattr(head, "weight", None) is None:
        return None
    return address(embedding.weight) == address(head.weight)


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing a progress bar for each part of a model that is loaded inside the block."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
