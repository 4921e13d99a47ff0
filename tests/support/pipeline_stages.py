"""A tiny Llama in three pipeline stages, and the same generation in one process."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hiddentap.capture.outputs import (
    CommittedTokens,
    DeviceAuxiliaryOutput,
    RowBuffer,
    RowLayout,
    add_auxiliary_output_to_pp_tensors,
    commits_of_step,
    pipeline_observer,
    pop_auxiliary_output_from_pp_tensors,
    visible_length,
)
from hiddentap.capture.sampling import (
    LogprobObserver,
    Sampler,
    SamplingInfo,
    SamplingMaskObserver,
    SamplingParams,
    SamplingState,
    TopKLogitsObserver,
    refused_tokens,
)
from hiddentap.capture.sampling.disaggregation.transfer import receive_message, send_message
from support.tiny import build_llama, token_ids

STAGES, LAYERS_PER_STAGE, STEPS = 3, 2, 5
PROMPTS = token_ids(4, 6).tolist()
PARAMS = [
    SamplingParams(temperature=0.0, return_sampling_mask=True, top_logits=3),
    SamplingParams(seed=7, top_p=0.9, temperature=0.8, return_sampling_mask=True, return_logprob=True),
    SamplingParams(seed=8),
    SamplingParams(seed=9, top_k=4, return_logprob=True, presence_penalty=0.5, return_sampling_mask=True),
]
FINISHED_AT = [STEPS, 3, STEPS, STEPS]
"""Request 1 counts as finished after three tokens, though the steps go on and sample for it."""

SAMPLED_COLUMNS = ["sampling_mask", "sampling_logprobs", "logprobs", "topk_logits", "topk_ids", "topk_logsumexp"]


@dataclass
class StagedRequest:
    rid: str
    finished_at: int
    output_ids: list[int] = field(default_factory=list)
    finished_len: int | None = None
    aborted: bool = False
    rows: RowBuffer = field(default_factory=lambda: RowBuffer(dict.fromkeys(SAMPLED_COLUMNS, len(PROMPTS[0]) - 1)))


@dataclass
class StagedBatch:
    reqs: list[StagedRequest]


def new_batch() -> StagedBatch:
    return StagedBatch([StagedRequest(f"r{index}", finished_at) for index, finished_at in enumerate(FINISHED_AT)])


def new_observers() -> list[Any]:
    return [SamplingMaskObserver(), LogprobObserver(), TopKLogitsObserver()]


def new_states() -> list[SamplingState]:
    return [SamplingState.of(one, prompt, []) for one, prompt in zip(PARAMS, PROMPTS, strict=True)]


def info_of_step(states: list[SamplingState], step: int) -> SamplingInfo:
    count = len(states)
    return SamplingInfo(states, RowLayout((1,) * count, (len(PROMPTS[0]) - 1 + step,) * count, (0,) * count))


def ids_so_far(batch: StagedBatch) -> Tensor:
    return torch.tensor([prompt + one.output_ids for prompt, one in zip(PROMPTS, batch.reqs, strict=True)])


def commit_step(batch: StagedBatch, token_ids: list[int], observed: DeviceAuxiliaryOutput | None) -> None:
    """What every step ends with on the rank that owns the requests."""
    host = None if observed is None else observed.copy_to_host(torch.clone)
    if host is not None and refused_tokens(host):
        raise RuntimeError(f"nothing should be refused here: {refused_tokens(host)}")
    starts = [visible_length(request) for request in batch.reqs]
    for request, token in zip(batch.reqs, token_ids, strict=True):
        request.output_ids.append(token)
        if len(request.output_ids) == request.finished_at:
            request.finished_len = request.finished_at
    commits: list[CommittedTokens | None] = commits_of_step(batch, starts)
    if host is not None:
        host.consume(batch, commits)


def result_of(batch: StagedBatch) -> list[dict[str, Any]]:
    return [
        {
            "output_ids": request.output_ids,
            **{name: column.tolist() for name, column in request.rows.columns().items()},
            **{name: column.to_lists() for name, column in request.rows.ragged_columns().items()},
        }
        for request in batch.reqs
    ]


@torch.no_grad()
def in_one_process() -> list[dict[str, Any]]:
    model = build_llama(num_hidden_layers=STAGES * LAYERS_PER_STAGE)
    batch, states, sampler = new_batch(), new_states(), Sampler(new_observers())
    for step in range(STEPS):
        output = sampler.sample(model(ids_so_far(batch), use_cache=False).logits[:, -1], info_of_step(states, step))
        for state, token in zip(states, output.token_ids.tolist(), strict=True):
            state.output_ids.append(token)  # type: ignore[attr-defined]
        commit_step(batch, output.token_ids.tolist(), output.observed)
    return result_of(batch)


@torch.no_grad()
def run_stage(rank: int, folder: Path) -> None:
    """One rank of the pipeline; rank 0 writes what its requests got."""
    model = build_llama(num_hidden_layers=STAGES * LAYERS_PER_STAGE).model
    head = build_llama(num_hidden_layers=STAGES * LAYERS_PER_STAGE).lm_head
    if rank == 0:
        batch, states = new_batch(), new_states()
        for step in range(STEPS):
            send_message({}, {"hidden": through_layers(model, rank, model.embed_tokens(ids_so_far(batch)))}, 1)
            take_result(batch, info_of_step(states, step))
        (folder / "result.json").write_text(json.dumps(result_of(batch)))
    elif rank == STAGES - 1:
        states, sampler = new_states(), Sampler(new_observers())
        for step in range(STEPS):
            hidden = through_layers(model, rank, receive_message(rank - 1)[1]["hidden"])
            sample_and_send(sampler, head(model.norm(hidden))[:, -1], info_of_step(states, step), rank - 1)
    else:
        for _ in range(STEPS):
            hidden = through_layers(model, rank, receive_message(rank - 1)[1]["hidden"])
            send_message({}, {"hidden": hidden}, rank + 1)
            send_message({}, receive_message(rank + 1)[1], rank - 1)


def through_layers(model: Any, rank: int, hidden: Tensor) -> Tensor:
    positions = torch.arange(hidden.shape[1])[None]
    rotary = model.rotary_emb(hidden, positions)
    for layer in model.layers[rank * LAYERS_PER_STAGE : (rank + 1) * LAYERS_PER_STAGE]:
        hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary)
    return hidden


def sample_and_send(sampler: Sampler, logits: Tensor, info: SamplingInfo, destination: int) -> None:
    output = sampler.sample(logits, info)
    for state, token in zip(info.requests, output.token_ids.tolist(), strict=True):
        state.output_ids.append(token)  # type: ignore[attr-defined]
    tensors: dict[str, Any] = {"next_token_ids": output.token_ids}
    add_auxiliary_output_to_pp_tensors(tensors, output.observed)
    send_message({}, tensors, destination)


def take_result(batch: StagedBatch, info: SamplingInfo) -> None:
    tensors: dict[str, Any] = receive_message(1)[1]
    active = [observer for observer in new_observers() if observer.is_active(info)]
    observed = pop_auxiliary_output_from_pp_tensors(tensors, pipeline_observer(active))
    if list(tensors) != ["next_token_ids"]:
        raise RuntimeError(f"only foreign keys should be left: {list(tensors)}")
    commit_step(batch, tensors["next_token_ids"].tolist(), observed)
