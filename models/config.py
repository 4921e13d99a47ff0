"""What a model's config says of its text decoder."""

from __future__ import annotations

from typing import Any


def text_config(config: Any) -> Any:
    """The part of a model config that speaks of its text decoder."""
    get_text_config = getattr(config, "get_text_config", None)
    return get_text_config(decoder=True) if callable(get_text_config) else config


def stated_depth(config: Any) -> int | None:
    """The number of decoder layers that the config states; some state the encoder's, or twice the real one."""
    depth = getattr(text_config(config), "num_hidden_layers", None)
    return depth if isinstance(depth, int) else None


def role_ids(config: Any) -> frozenset[int]:
    """The token ids that the config gives a role to: pads, ends, images and the like."""
    found: set[int] = set()
    for part in (config, text_config(config)):
        for name, value in vars(part).items() if part is not None else ():
            if name.endswith(("token_id", "token_index")):
                found.update(v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, int))
    return frozenset(found)


def stated_positions(config: Any) -> int | None:
    """The most positions that the config gives the model; None where it sets no such limit."""
    most = getattr(text_config(config), "max_position_embeddings", None)
    return most if isinstance(most, int) and most > 0 else None
