"""Facts about the text decoder in a model's config."""

from __future__ import annotations

from typing import Any

from torch import nn


def model_config(model: nn.Module) -> Any:
    """Return the config of `model`, or of the outermost module inside it that has one; None where none has.

    A module of somebody's own around a model has no config, and the model changes its rows at the same lengths all the same.
    """
    found = (getattr(module, "config", None) for module in model.modules())
    return next((config for config in found if hasattr(config, "model_type")), getattr(model, "config", None))


def text_config(config: Any) -> Any:
    """Return the part of a model config that speaks of its text decoder."""
    get_text_config = getattr(config, "get_text_config", None)
    return get_text_config(decoder=True) if callable(get_text_config) else config


def model_types(config: Any) -> tuple[str, ...]:
    """Return the ``model_type`` of a model config and of its text config, once each."""
    found = (getattr(part, "model_type", None) for part in (config, text_config(config)))
    return tuple(dict.fromkeys(name for name in found if isinstance(name, str) and name))


def stated_depth(config: Any) -> int | None:
    """Return the number of decoder layers that the config states; some state the encoder's, or twice the real one."""
    depth = getattr(text_config(config), "num_hidden_layers", None)
    return depth if isinstance(depth, int) else None


def role_ids(config: Any) -> frozenset[int]:
    """Return the token ids that the config gives a role to: pads, ends, images and the like."""
    found: set[int] = set()
    for part in (config, text_config(config)):
        for name, value in vars(part).items() if part is not None else ():
            if name.endswith(("token_id", "token_index")):
                found.update(v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, int))
    return frozenset(found)


def stated_positions(config: Any) -> int | None:
    """Return the most positions that the config gives the model; None where it sets no such limit."""
    most = getattr(text_config(config), "max_position_embeddings", None)
    return most if isinstance(most, int) and most > 0 else None


_LENGTHS = ("max_position", "window", "chunk", "seq_len", "seq_length", "n_positions", "n_ctx", "context_length")


def named_lengths(config: Any) -> tuple[int, ...]:
    """Return the sequence lengths that the config names, ascending: most positions, windows, chunks, rotary limits."""
    text = text_config(config)
    found: set[int] = set()
    waiting = [dict(vars(text))] if text is not None and hasattr(text, "__dict__") else []
    while waiting:
        for name, value in waiting.pop().items():
            if isinstance(value, dict):
                waiting.append(value)
            elif type(value) is int and value > 1 and any(word in str(name) for word in _LENGTHS):
                found.add(value)
    return tuple(sorted(found))


def columns_of_one_scale(config: Any) -> int | None:
    """Return from how many columns on attention is scaled by the column, as in Llama 4; None where it is not."""
    text = text_config(config)
    step = getattr(text, "floor_scale", None)
    return step if getattr(text, "attn_temperature_tuning", False) and type(step) is int else None


# Budgets of indexers, each with what one selected entry stands for: positions, blocks or compressed groups of them.
_BUDGETS = {"index_topk": "compress_rates", "index_topk_blocks": "index_block_size", "indexer_budget": None}


def selected_positions(config: Any) -> int | None:
    """Return the most positions of which sparse attention takes every one; None where the config names no such budget."""
    text, found = text_config(config), []
    for name, unit in _BUDGETS.items():
        budget = getattr(text, name, None)
        if type(budget) is int:
            found.append(budget * _smallest(getattr(text, unit, None) if unit else None))
    return min(found, default=None)


def _smallest(unit: Any) -> int:
    """Return the least positive integer in a number, a list or a table; 1 if there is none."""
    values = unit.values() if isinstance(unit, dict) else unit if isinstance(unit, (list, tuple)) else [unit]
    return min((value for value in values if type(value) is int and value > 0), default=1)
