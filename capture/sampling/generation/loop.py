"""The loop over steps: prompts in, requests out as they end."""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...outputs import DeviceAuxiliaryOutput, DeviceHiddenStates, HostCopy, RowLayout, append_auxiliary_output
from ...progress import Done, Progress
from ..kv_cache.held_positions import HeldPositions, kept, lined_up, of_equal_length
from ..sampler.sampler import Sampler
from ..sampler.sampling_info import SamplingInfo
from .cached_model import CachedModel, StepOutput
from .finish import Aborts
from .request import GenerationRequest, ids_of, last_token
from .step_commit import Drafts, commit_step


@dataclass(frozen=True)
class LoopSettings:
    """Settings of how the loop shares steps.

    max_batch: requests under way at once.
    prefill_chunk: most prompt tokens of one step; `None` runs each prompt in one.
    prompt_lookup: most draft tokens per step.
    shares_steps: whether requests of different lengths share a step.
    """

    max_batch: int
    prefill_chunk: int | None
    prompt_lookup: int
    shares_steps: bool


@dataclass(frozen=True)
class _Running:
    """Requests that sample together, and their cache."""

    requests: list[GenerationRequest]
    held: HeldPositions


class GenerationLoop:
    """Runs requests to their ends. The taps of `model` are attached while it does."""

    def __init__(
        self,
        model: CachedModel,
        sampler: Sampler,
        settings: LoopSettings,
        aborts: Aborts,
        ended: Callable[[GenerationRequest], None],
        progress: Progress,
    ) -> None:
        """`ended` is called once for each request, in the order of their ends; the request's rows are let go of behind it."""
        self._model, self._sampler, self._settings = model, sampler, settings
        self._aborts, self._ended, self._progress = aborts, ended, progress
        self._host_copy = HostCopy(model.device)

    def run(self, requests: Iterable[GenerationRequest]) -> None:
        """Run every request: prompts enter as others end, at most `max_batch` are under way."""
        waiting, running = deque(requests), list[_Running]()
        while waiting or running:
            admitted = [waiting.popleft() for _ in range(min(self._room(running), len(waiting)))]
            running += self._prefilled(admitted)
            running = [left for batch in self._together(running) for left in self._decoded(batch)]

    def _room(self, running: Sequence[_Running]) -> int:
        """Return how many requests may enter now: none until a quarter of the batch is free, as every entry copies the cache."""
        most = self._settings.max_batch
        room = most - sum(len(batch.requests) for batch in running)
        return room if room >= max(most // 4, 1) else 0

    def _prefilled(self, admitted: Sequence[GenerationRequest]) -> list[_Running]:
        """Run prompts, those of equal length together, and sample the first token of each."""
        by_length: dict[int, list[GenerationRequest]] = defaultdict(list)
        for request in admitted:
            if self._aborts_hold(request):
                self._end(request)
            else:
                by_length[request.P].append(request)
        return [left for P, requests in by_length.items() for left in self._prefill(requests, P)]

    def _prefill(self, requests: list[GenerationRequest], P: int) -> list[_Running]:
        ids, B, chunk = ids_of(requests), len(requests), self._settings.prefill_chunk or P
        held = HeldPositions.nothing(self._model.new_cache(recording=self._settings.prompt_lookup > 0), B)
        for begin in range(0, P, chunk):
            part = ids[:, begin : begin + chunk]
            S = part.shape[1]
            output = self._model.step(part, held, 1)
            held = held.grown(S)
            root: DeviceAuxiliaryOutput | None = _hidden_states(output, RowLayout.of_prompts([S] * B, [begin] * B))
            if begin + S == P:
                root = self._with_sampled(root, requests, output.logits[:, -1], Drafts.none(B), [P - 1] * B)
            self._commit(requests, root, Drafts.none(B))
        return self._left(requests, held, [0] * B)

    def _decoded(self, batch: _Running) -> list[_Running]:
        """Run the last token of each request and its draft tokens, and sample behind each of them."""
        requests = batch.requests
        aborted = [request for request in requests if self._aborts_hold(request)]
        if aborted:
            return self._left(requests, batch.held, [0] * len(requests))
        drafts = Drafts.of(requests, self._settings.prompt_lookup)
        S = drafts.stride
        output = self._model.step(_step_ids(requests, drafts), batch.held, S)
        counts = [len(draft) + 1 for draft in drafts.token_ids]
        layout = RowLayout.of_verify_step(S, counts, batch.held.lengths)
        rows = [row * S + place for row, count in enumerate(counts) for place in range(count)]
        logits = output.logits.flatten(0, 1)
        if len(rows) < len(logits):
            logits = logits[torch.tensor(rows, device=logits.device)]
        root = self._with_sampled(_hidden_states(output, layout), requests, logits, drafts, batch.held.lengths)
        taken = self._commit(requests, root, drafts)
        return self._left(requests, batch.held.grown(S), [S - count for count in taken])

    def _with_sampled(
        self,
        root: DeviceAuxiliaryOutput | None,
        requests: Sequence[GenerationRequest],
        logits: Tensor,
        drafts: Drafts,
        positions: Sequence[int],
    ) -> DeviceAuxiliaryOutput | None:
        """`root` with what was sampled and observed behind it; the first row of each request is at `positions`."""
        counts = tuple(len(draft) + 1 for draft in drafts.token_ids)
        layout = RowLayout(counts, tuple(positions), (0,) * len(counts))
        sampled = self._sampler.sample(logits, SamplingInfo([one.state for one in requests], layout, drafts.token_ids))
        return append_auxiliary_output(append_auxiliary_output(root, sampled.tokens), sampled.observed)

    def _commit(
        self, requests: Sequence[GenerationRequest], root: DeviceAuxiliaryOutput | None, drafts: Drafts
    ) -> list[int]:
        """End a step; returns the tokens each request took."""
        if root is None:  # a middle chunk without taps
            return [0] * len(requests)
        taken = commit_step(requests, root, drafts, self._host_copy, self._aborts)
        self._progress.advanced(Done(tokens=sum(taken)))
        return taken

    def _left(self, requests: Sequence[GenerationRequest], held: HeldPositions, drops: Sequence[int]) -> list[_Running]:
        """Return the requests that go on, without the positions of `drops`; hand out the others."""
        rows = [row for row, request in enumerate(requests) if request.finish is None]
        for request in requests:
            if request.finish is not None:
                self._end(request)
        parts = kept(held, rows, [drops[row] for row in rows])
        return [_Running([requests[row] for row in chosen], part) for chosen, part in parts]

    def _together(self, running: list[_Running]) -> list[_Running]:
        """Batches for the next steps: everyone in one where lengths may differ, else one for each length.

        Never across a length at which the model changes its rotary frequencies: all lengths of a batch are on one side of it.
        """
        cuts = self._model.tapped.limits.cuts
        groups: dict[tuple[int, int], list[_Running]] = defaultdict(list)
        for batch in running:
            length = batch.held.lengths[0]
            groups[0 if self._settings.shares_steps else length, bisect_left(cuts, length)].append(batch)
        join = lined_up if self._settings.shares_steps else of_equal_length
        return [
            _Running([one for batch in batches for one in batch.requests], join([batch.held for batch in batches]))
            for batches in groups.values()
        ]

    def _aborts_hold(self, request: GenerationRequest) -> bool:
        """Abort `request` if the caller gave it up; return whether it is aborted."""
        if request.index in self._aborts:
            request.abort()
        return request.aborted

    def _end(self, request: GenerationRequest) -> None:
        self._ended(request)
        request.release()
        self._progress.advanced(Done(1))


def _hidden_states(output: StepOutput, layout: RowLayout) -> DeviceHiddenStates | None:
    return DeviceHiddenStates(output.columns, layout) if output.columns else None


def _step_ids(requests: Sequence[GenerationRequest], drafts: Drafts) -> Tensor:
    """Return (B, S): the last token of each request and its draft tokens, repeated to the longest draft."""
    rows = [[last_token(one), *draft] for one, draft in zip(requests, drafts.token_ids, strict=True)]
    return torch.tensor([row + row[-1:] * (drafts.stride - len(row)) for row in rows])
