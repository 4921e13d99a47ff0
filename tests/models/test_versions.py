"""What older versions of transformers lack, played by caches that lack it."""

import pytest
from transformers import DynamicCache

from hiddentap.models.errors import RunError
from hiddentap.models.versions import record_past
from support import tiny


class OlderCache:
    """A cache of transformers before 5.14: it records nothing."""

    def __init__(self, cache: DynamicCache) -> None:
        self.layers = cache.layers


def test_a_cache_that_drops_no_position_needs_no_recording() -> None:
    record_past(OlderCache(DynamicCache(config=tiny.llama_config())))


def test_a_cache_that_drops_positions_is_refused_where_nothing_can_bring_them_back() -> None:
    cache = DynamicCache(config=tiny.build("gemma2").config)
    with pytest.raises(
        RunError, match=r"drops positions, and transformers \S+ cannot bring them back; install transformers 5\.14"
    ):
        record_past(OlderCache(cache))


def test_a_cache_that_records_is_told_to() -> None:
    cache = DynamicCache(config=tiny.llama_config())
    if not hasattr(cache, "activate_past_recording"):
        pytest.skip("this transformers records nothing")
    told = []
    cache.activate_past_recording = lambda: told.append(True)
    record_past(cache)
    assert told == [True]
