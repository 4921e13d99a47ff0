"""Rows of a cache taken, put together and cut off, against plain forwards of the same tokens."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, EncoderDecoderCache

from hiddentap.capture.sampling.kv_cache.cache import batch_size, crop, merge, select
from support.architectures import token_ids
from support.cached_steps import FIELDS, LAYERS, empty_cache, model_of, plain, step

SLIDING = ["gemma2", "gpt_oss", "gemma4_text", "inkling_text"]
ROLLS_BACK = ["llama", "deepseek_v32", "minimax_m3_vl_text", "lfm2_moe", *SLIDING]
RUNNING_STATE = ["qwen3_next", "kimi_linear", "mamba2", "falcon_h1", "qwen4_exp_text", "deepseek_v4"]
IDS = token_ids(3, 14)


def close(found: Tensor, expected: Tensor) -> None:
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < 1e-5, error


def prefilled(name: str, ids: Tensor, recording: bool = False) -> Any:
    cache = empty_cache(name, recording)
    step(name, ids, cache)
    return cache


def contents(cache: Any) -> list[Any]:
    return copy.deepcopy([vars(layer) for layer in cache.layers])


def same(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor):
        return isinstance(after, Tensor) and torch.equal(before, after)
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(same(before[key], after[key]) for key in before)
    if isinstance(before, list):
        return len(before) == len(after) and all(same(a, b) for a, b in zip(before, after, strict=True))
    return bool(before == after)


@pytest.mark.parametrize("name", FIELDS)
def test_the_tiny_models_have_the_layers_they_stand_for(name: str) -> None:
    assert {type(layer).__name__ for layer in prefilled(name, IDS[:1, :9]).layers} == LAYERS[name]


@pytest.mark.parametrize("name", FIELDS)
def test_selected_rows_go_on_as_if_they_had_been_alone(name: str) -> None:
    cache = select(prefilled(name, IDS[:, :10]), [2, 0])
    assert batch_size(cache) == 2
    for position in (10, 11):
        logits = step(name, IDS[[2, 0], position : position + 1], cache)
        close(logits[:, 0], plain(name, IDS[[2, 0], : position + 1]))


@pytest.mark.parametrize("name", FIELDS)
def test_merged_caches_go_on_as_if_each_had_been_alone(name: str) -> None:
    first, second = prefilled(name, IDS[2:, :10]), prefilled(name, IDS[:2, :10])
    cache = merge([first, second])
    assert batch_size(cache) == 3
    for position in (10, 11):
        logits = step(name, IDS[[2, 0, 1], position : position + 1], cache)
        close(logits[:, 0], plain(name, IDS[[2, 0, 1], : position + 1]))


@pytest.mark.parametrize("name", FIELDS)
def test_requests_that_meet_at_the_same_length_by_different_ways_can_be_merged(name: str) -> None:
    def caches() -> list[Any]:
        whole, grown = prefilled(name, IDS[:1, :10]), prefilled(name, IDS[1:2, :8])
        for position in (8, 9):
            step(name, IDS[1:2, position : position + 1], grown)
        return [whole, grown]

    merged = step(name, IDS[:2, 10:11], merge(caches()))[:, 0]
    alone = torch.cat([step(name, IDS[i : i + 1, 10:11], cache) for i, cache in enumerate(caches())])
    close(merged, alone[:, 0])
    # By steps, the delta rule of transformers itself is off a whole forward: 1.5e-5 on a CPU with AVX-512, without any merge.
    if name != "qwen3_next":
        close(merged, plain(name, IDS[:2, :11]))


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("operation", ["select", "merge"])
def test_the_cache_that_was_given_stays_as_it_was_and_shares_no_later_step(name: str, operation: str) -> None:
    cache = prefilled(name, IDS[:2, :9])
    before = contents(cache)
    result = select(cache, [1, 0]) if operation == "select" else merge([cache, prefilled(name, IDS[2:, :9])])
    step(name, IDS[: batch_size(result), 9:10], result)
    assert same(before, contents(cache))


@pytest.mark.parametrize("name", ROLLS_BACK)
@pytest.mark.parametrize(("first", "second", "count"), [(9, 4, 2), (9, 4, 4), (2, 2, 1), (5, 6, 3)])
def test_a_cropped_cache_goes_on_as_if_the_last_positions_had_not_been_seen(
    name: str, first: int, second: int, count: int
) -> None:
    cache = crop(prefilled(name, IDS[:, :first], recording=True), 0)
    step(name, IDS[:, first : first + second], cache)
    cache = crop(cache, count)
    length = first + second - count
    close(step(name, IDS[:, length : length + 1], cache)[:, 0], plain(name, IDS[:, : length + 1]))


@pytest.mark.parametrize("name", ROLLS_BACK)
def test_the_cache_that_was_cropped_stays_as_it_was(name: str) -> None:
    cache = prefilled(name, IDS[:, :9], recording=True)
    before = contents(cache)
    step(name, IDS[:, 7:8], crop(cache, 2))
    assert same(before, contents(cache))


@pytest.mark.parametrize("name", RUNNING_STATE)
@pytest.mark.parametrize("recording", [False, True])
def test_a_layer_with_a_running_state_cannot_be_cropped(name: str, recording: bool) -> None:
    cache = prefilled(name, IDS[:, :9], recording)
    before = contents(cache)
    with pytest.raises(RuntimeError, match="keeps a running state that cannot go back 2 positions"):
        crop(cache, 2)
    assert same(before, contents(cache))


@pytest.mark.parametrize("name", [*SLIDING, "lfm2_moe"])
def test_a_layer_that_dropped_positions_cannot_bring_them_back(name: str) -> None:
    cache = prefilled(name, IDS[:, :12])
    with pytest.raises(RuntimeError, match=r"has dropped positions.*call activate_past_recording\(\)"):
        crop(cache, 2)


@pytest.mark.parametrize("name", [*SLIDING, "lfm2_moe"])
def test_no_more_positions_come_back_than_were_recorded(name: str) -> None:
    cache = crop(prefilled(name, IDS[:, :10], recording=True), 1)
    step(name, IDS[:, 9:11], cache)
    with pytest.raises(RuntimeError, match="has dropped positions that would be visible again 6 positions earlier"):
        crop(cache, 6)


def test_a_sliding_window_that_is_not_full_needs_no_recording() -> None:
    cache = crop(prefilled("gemma2", IDS[:, :6]), 2)
    close(step("gemma2", IDS[:, 4:5], cache)[:, 0], plain("gemma2", IDS[:, :5]))


@pytest.mark.parametrize(("count", "text"), [(-1, "must not be negative; found -1"), (10, "has seen 9 positions")])
def test_an_impossible_crop_is_refused(count: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        crop(prefilled("llama", IDS[:, :9]), count)


def test_nothing_is_taken_off_by_a_crop_of_zero() -> None:
    cache = prefilled("mamba2", IDS[:, :9])
    assert crop(cache, 0) is cache


@pytest.mark.parametrize("name", [name for name in FIELDS if name != "mamba2"])
def test_caches_of_different_lengths_are_not_merged(name: str) -> None:
    with pytest.raises(ValueError, match="have seen the same number of positions"):
        merge([prefilled(name, IDS[:1, :9]), prefilled(name, IDS[:1, :10])])


@pytest.mark.parametrize("name", SLIDING)
def test_full_windows_at_different_positions_are_not_merged_though_their_tensors_fit(name: str) -> None:
    shorter, longer = prefilled(name, IDS[:1, :12]), prefilled(name, IDS[:1, :13])
    sliding = next(i for i, layer in enumerate(shorter.layers) if getattr(layer, "is_sliding", False))
    assert shorter.layers[sliding].keys.shape == longer.layers[sliding].keys.shape
    alone = [select(cache, [0]) for cache in (shorter, longer)]
    for cache in alone:
        cache.layers = [cache.layers[sliding]]
    with pytest.raises(ValueError, match="cumulative_length of layer 0 is 12 in the first and 13 in another"):
        merge(alone)


def test_caches_of_different_models_are_not_merged() -> None:
    with pytest.raises(ValueError, match="class of layer 0 is"):
        merge([prefilled("llama", IDS[:1, :9]), prefilled("deepseek_v32", IDS[:1, :9])])


def test_caches_with_different_numbers_of_layers_are_not_merged() -> None:
    cache = prefilled("llama", IDS[:1, :9])
    shorter = select(cache, [0])
    shorter.layers = shorter.layers[:3]
    with pytest.raises(ValueError, match=r"same layers; found \[4, 3\] layers"):
        merge([cache, shorter])


def test_nothing_to_merge_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one cache"):
        merge([])


@pytest.mark.parametrize("rows", [[3], [-1], [0, 7]])
def test_rows_that_do_not_exist_are_refused(rows: list[int]) -> None:
    with pytest.raises(ValueError, match=r"rows must be in 0\.\.2"):
        select(prefilled("llama", IDS[:, :9]), rows)


class GrownLayer(DynamicLayer):
    """A subclass may hold more than its parent."""


def test_a_layer_of_an_unknown_class_is_refused_by_name() -> None:
    cache = prefilled("llama", IDS[:, :9])
    cache.layers[2] = GrownLayer()
    for operation in (lambda: select(cache, [0]), lambda: merge([cache, cache]), lambda: crop(cache, 1)):
        with pytest.raises(RuntimeError, match=r"cache layer 2 is a .*GrownLayer, whose contents are not known"):
            operation()


class GrownCache(DynamicCache):
    """A cache with something beside its layers."""


UNKNOWN: dict[str, Callable[[], Any]] = {
    "GrownCache": GrownCache,
    "StaticCache": lambda: StaticCache(config=model_of("llama").config, max_cache_len=16),
    "EncoderDecoderCache": lambda: EncoderDecoderCache(empty_cache("llama"), empty_cache("llama")),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_cache_of_an_unknown_class_is_refused_by_name(name: str) -> None:
    with pytest.raises(RuntimeError, match=rf"the cache is a \S*{name}; only what DynamicCache"):
        select(UNKNOWN[name](), [0])


def test_an_empty_cache_has_no_rows() -> None:
    assert batch_size(empty_cache("qwen3_next")) == 0
