"""The two sides of a hand-off between processes: rank 0 prefills, rank 1 decodes."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from hiddentap.capture.outputs import CommittedTokens, DeviceHiddenStates, RowBuffer, RowLayout
from hiddentap.capture.sampling import (
    FirstToken,
    LogprobObserver,
    MetadataBuffers,
    Sampler,
    SamplingInfo,
    SamplingMaskObserver,
    SamplingParams,
    SamplingState,
)
from hiddentap.capture.sampling.disaggregation.transfer import receive_request, send_request
from hiddentap.capture.sampling.generation.cached_model import CachedModel, cached_model
from hiddentap.capture.sampling.kv_cache.cache import merge
from hiddentap.capture.sampling.kv_cache.held_positions import HeldPositions
from hiddentap.models.layer_choice import LayerChoice
from support.architectures import token_ids
from support.cached_steps import empty_cache, step
from support.fake_requests import FakeBatch, FakeRequest
from support.generation import LAYER_IDS, PROMPTS, lively

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
    go_on(rank, folder)
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


# A generation whose first token comes from the prefill process. All go through one slot, one after the other.

COUNT = 8
FAMILIES = ["llama", "kimi_linear"]
PARAMS = [
    SamplingParams(temperature=0, max_new_tokens=COUNT, ignore_eos=True, return_sampling_mask=True),
    SamplingParams(
        seed=3, top_k=9, max_new_tokens=COUNT, ignore_eos=True, return_sampling_mask=True, return_logprob=True
    ),
    SamplingParams(seed=4, max_new_tokens=COUNT, ignore_eos=True),
]


def go_on(rank: int, folder: Path) -> None:
    """Each side writes the rows it made: the prompt's, and those of the tokens behind the first."""
    results = {family: [_half(rank, family, place) for place in range(len(PARAMS))] for family in FAMILIES}
    (folder / f"generation-{rank}.json").write_text(json.dumps(results))


def _half(rank: int, family: str, place: int) -> dict[str, Any]:
    model = cached_model(lively(family), LayerChoice(LAYER_IDS))
    buffers = MetadataBuffers(slots=1, max_sampling_mask_tokens=16)
    with model.attached():
        return (_first_half if rank == 0 else _second_half)(model, buffers, place)


def _first_half(model: CachedModel, buffers: MetadataBuffers, place: int) -> dict[str, Any]:
    prompt, params = PROMPTS[place], PARAMS[place]
    request = FakeRequest(rows=RowBuffer({"aux_hidden_states": 0}, otherwise=len(prompt) - 1))  # type: ignore[arg-type]
    state = SamplingState.of(params, prompt, request.output_ids)
    held = HeldPositions.nothing(model.new_cache(), 1)
    _sampled_step(model, held, state, request, prompt, RowLayout.of_prompts([len(prompt)]), len(prompt) - 1)
    found = _rows(request)
    mask = found.get("sampling_mask", [None])[0]
    first = FirstToken(
        request.output_ids[0], found.get("logprobs", [None])[0], (), (), params.return_sampling_mask, mask,
        found.get("sampling_logprobs", [None])[0],
    )  # fmt: skip
    buffers.set_buf(0, first)
    send_request(buffers, 0, held.cache, destination=1)
    return found


def _second_half(model: CachedModel, buffers: MetadataBuffers, place: int) -> dict[str, Any]:
    prompt, params = PROMPTS[place], PARAMS[place]
    P = len(prompt)
    held = HeldPositions(receive_request(buffers, 0, model.new_cache(), source=0), (P,), P)
    first = buffers.get_buf(0, wants_sampling_mask=params.return_sampling_mask)
    request = FakeRequest(output_ids=[first.token_id], rows=RowBuffer(otherwise=P))  # type: ignore[arg-type]
    state = SamplingState.of(params, prompt, request.output_ids)
    state.next_uniform()  # the one that the first token took
    for _ in range(COUNT - 1):
        layout = RowLayout((1,), held.lengths, (0,))
        _sampled_step(model, held, state, request, request.output_ids[-1:], layout, held.lengths[0])
        held = held.grown(1)
    return {"first_token": first.token_id, "first_mask": first.sampling_mask, **_rows(request)}


def _sampled_step(
    model: CachedModel,
    held: HeldPositions,
    state: SamplingState,
    request: FakeRequest,
    token_ids: list[int],
    layout: RowLayout,
    position: int,
) -> None:
    output = model.step(torch.tensor([token_ids]), held, 1)
    info = SamplingInfo([state], RowLayout((1,), (position,), (0,)))
    sampled = Sampler([SamplingMaskObserver(), LogprobObserver()]).sample(output.logits[:, -1], info)
    request.output_ids.append(int(sampled.token_ids))
    commits = [CommittedTokens(len(request.output_ids) - 1, (request.output_ids[-1],))]
    for device in (DeviceHiddenStates(output.columns, layout), sampled.tokens, sampled.observed):
        if device is not None:
            device.copy_to_host(torch.clone).consume(FakeBatch([request]), commits)


def _rows(request: FakeRequest) -> dict[str, Any]:
    rows: Any = request.rows
    dense = {name: column.tolist() for name, column in rows.columns().items()}
    return dense | {name: column.to_lists() for name, column in rows.ragged_columns().items()}
