"""The end of every step: one copy to the host, the commit of its tokens, and one consume."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ...outputs import (
    CompositeHostAuxiliaryOutput,
    DeviceAuxiliaryOutput,
    HostAuxiliaryOutput,
    HostCopy,
    commits_of_step,
    visible_length,
)
from ..sampler.sampled_rows import HostSampledTokens, refused_tokens
from .finish import Aborts
from .request import GenerationRequest, SampledRun


@dataclass(frozen=True)
class StepBatch:
    """The requests of one step, in the order of their rows."""

    reqs: Sequence[GenerationRequest]


@dataclass(frozen=True)
class Drafts:
    """The drafted tokens of each request of a step, and its generator's state before the step where there are any."""

    token_ids: Sequence[Sequence[int]]
    generators: Sequence[Tensor | None]

    @classmethod
    def of(cls, requests: Sequence[GenerationRequest], count: int) -> "Drafts":
        """Return at most `count` draft tokens for each request."""
        drafts = [request.draft(count) if count else [] for request in requests]
        states = [
            request.state.generator.get_state() if draft else None
            for request, draft in zip(requests, drafts, strict=True)
        ]
        return cls(drafts, states)

    @classmethod
    def none(cls, B: int) -> "Drafts":
        """Return no draft tokens for each of B requests."""
        return cls([()] * B, [None] * B)

    @property
    def stride(self) -> int:
        """Tokens of the step for each request: the last one and as many as the longest draft has."""
        return 1 + max(len(draft) for draft in self.token_ids)


def commit_step(
    requests: Sequence[GenerationRequest],
    root: DeviceAuxiliaryOutput,
    drafts: Drafts,
    host_copy: HostCopy,
    aborts: Aborts,
) -> list[int]:
    """Bring a step's root output to the host, commit its tokens, and hand the rows out; returns the tokens each request took.

    root: hidden states, and, but for a middle chunk of a prompt, sampled tokens and what observers recorded.
    Raises:
        ExceptionGroup: an observer's output could not be consumed.
    """
    batch = StepBatch(requests)
    host = host_copy.start(root).wait()
    starts = [visible_length(request) for request in requests]
    for request in requests:
        if request.index in aborts and request.finish is None:
            request.abort()
    taken = _take(requests, host, drafts)
    host.consume(batch, commits_of_step(batch, starts))
    return taken


def _take(requests: Sequence[GenerationRequest], host: HostAuxiliaryOutput, drafts: Drafts) -> list[int]:
    sampled = _sampled_tokens(host)
    if sampled is None:
        return [0] * len(requests)
    refused = refused_tokens(host)
    runs = zip(sampled.token_ids(), drafts.token_ids, drafts.generators, strict=True)
    return [
        request.take(SampledRun(tokens, draft, refused.get(index), generator)) if request.finish is None else 0
        for index, (request, (tokens, draft, generator)) in enumerate(zip(requests, runs, strict=True))
    ]


def _sampled_tokens(host: HostAuxiliaryOutput) -> HostSampledTokens | None:
    children = host.outputs if isinstance(host, CompositeHostAuxiliaryOutput) else (host,)
    return next((child for child in children if isinstance(child, HostSampledTokens)), None)
