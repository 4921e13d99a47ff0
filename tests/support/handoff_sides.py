"""The two sides of a hand-off between processes: rank 0 prefills, rank 1 decodes."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from hiddentap.capture.sampling import FirstToken, MetadataBuffers
from hiddentap.capture.sampling.cache import merge
from hiddentap.capture.sampling.transfer import receive_request, send_request
from support.architectures import token_ids
from support.cached_steps import empty_cache, step

IDS = token_ids(2, 10)
FIRST = [
    FirstToken(11, -0.5, [-0.5, -1.5], [11, 12], True, [11, 30, 12], -0.25),
    FirstToken(12, None, [], [], False, None, None),
]
GOOD = ["llama", "gemma2", "kimi_linear", "mamba2", "falcon_h1", "deepseek_v32", "deepseek_v4", "gemma4_text"]


class GrownCache(DynamicCache):
    """A cache whose contents nobody knows."""


def both(rank: int, folder: Path) -> None:
    """All of the below in one pair of processes."""
    hand_over(rank, folder)
    fail_to_hand_over(rank, folder)


def hand_over(rank: int, folder: Path) -> None:
    """Two requests of every model, one after the other; the decode side writes what it read and computed."""
    buffers = MetadataBuffers(slots=2, max_top_logprobs=2, max_sampling_mask_tokens=4)
    results = {name: (_prefill if rank == 0 else _decode)(name, buffers) for name in GOOD}
    if rank == 1:
        (folder / "results.json").write_text(json.dumps(results))


def _prefill(name: str, buffers: MetadataBuffers) -> None:
    for slot, first in enumerate(FIRST):
        cache = empty_cache(name)
        step(name, IDS[slot : slot + 1], cache)
        buffers.set_buf(slot, first)
        send_request(buffers, slot, cache, destination=1)


def _decode(name: str, buffers: MetadataBuffers) -> dict[str, Any]:
    # The slots of the two sides need not be the same.
    caches = [receive_request(buffers, 1 - index, empty_cache(name), source=0) for index in (0, 1)]
    firsts = [buffers.get_buf(1 - index, wants_sampling_mask=True) for index in (0, 1)]
    tokens = torch.tensor([[first.token_id] for first in firsts])
    logits = step(name, tokens, merge(caches))[:, 0]
    return {
        "masks": [first.sampling_mask for first in firsts],
        "sampling_logprobs": [first.sampling_logprob for first in firsts],
        "top_logprobs": [list(first.top_logprobs) for first in firsts],
        "top_ids": [list(first.top_ids) for first in firsts],
        "logprobs": [first.logprob for first in firsts],
        "tokens": tokens[:, 0].tolist(),
        "logits": logits.tolist(),
    }


def fail_to_hand_over(rank: int, folder: Path) -> None:
    """Requests that must be refused, then a good one; each side writes the errors it met."""
    errors = (_failing_prefill if rank == 0 else _failing_decode)()
    (folder / f"errors-{rank}.json").write_text(json.dumps(errors))


def _failing_prefill() -> list[str]:
    buffers = MetadataBuffers(slots=2, max_top_logprobs=2, max_sampling_mask_tokens=4)
    buffers.set_buf(0, FIRST[0])
    cache = empty_cache("llama")
    step("llama", IDS[:1], cache)
    errors = [
        _error(lambda: send_request(buffers, 1, cache, destination=1)),
        _error(lambda: send_request(buffers, 0, GrownCache(), destination=1)),
    ]
    for _ in range(5):
        send_request(buffers, 0, cache, destination=1)
    buffers.set_buf(0, FIRST[1])
    send_request(buffers, 0, cache, destination=1)
    return errors


def _failing_decode() -> list[str]:
    roomy = MetadataBuffers(slots=1, max_top_logprobs=2, max_sampling_mask_tokens=4)
    roomy.set_buf(0, FIRST[1])
    errors = [
        _error(lambda: receive_request(roomy, 0, empty_cache("llama"), source=0)),
        _error(lambda: roomy.get_buf(0)),
        _error(lambda: receive_request(roomy, 0, empty_cache("llama"), source=0)),
        _error(lambda: receive_request(roomy, 0, empty_cache("gemma2"), source=0)),
    ]
    narrow = MetadataBuffers(slots=1, max_top_logprobs=2, max_sampling_mask_tokens=2)
    errors.append(_error(lambda: receive_request(narrow, 0, empty_cache("llama"), source=0)))
    disabled = MetadataBuffers(slots=1, max_top_logprobs=2, max_sampling_mask_tokens=0)
    errors.append(_error(lambda: receive_request(disabled, 0, empty_cache("llama"), source=0)))
    short = MetadataBuffers(slots=1, max_top_logprobs=1, max_sampling_mask_tokens=4)
    errors.append(_error(lambda: receive_request(short, 0, empty_cache("llama"), source=0)))
    receive_request(roomy, 0, empty_cache("llama"), source=0)
    errors.append(str(roomy.get_buf(0, wants_sampling_mask=True).sampling_mask))
    errors.append(_error(lambda: receive_request(disabled, 0, empty_cache("llama"), source=0)))
    return errors


def _error(action: Any) -> str:
    try:
        action()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
