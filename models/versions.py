"""Differences between the versions of libraries that the package takes, each with the version that it ends with.

The ranges are in pyproject.toml; constraints/lowest.txt and constraints/highest.txt say what was tested.
"""

from __future__ import annotations

from transformers import Cache, __version__

from .errors import RunError

# What holds a cache in calls and outputs: `cache` since transformers 5.24, which renames the next two on the way in, and those
# before; rwkv has a list called `state`.
CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")


def record_past(cache: Cache) -> None:
    """Let `cache` keep what a crop needs to bring back, before anything is in it.

    transformers before 5.14 records nothing: there, caches that drop no position are cropped as they are, and others are refused.

    Raises:
        RunError: a cache whose layers drop positions, on transformers before 5.14.
    """
    if hasattr(cache, "activate_past_recording"):
        cache.activate_past_recording()
        return
    dropping = next((layer for layer in cache.layers if getattr(layer, "is_sliding", False)), None)
    if dropping is not None:
        raise RunError(
            f"the cache's {type(dropping).__name__} drops positions, and transformers {__version__} cannot bring them back; "
            "install transformers 5.14 or newer, or leave prompt_lookup out."
        )
