"""The requests of one sampling call, as the sampler sees them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ....models.errors import UsageError
from ...outputs import RowLayout
from .params import SamplingParams


@dataclass(frozen=True)
class SamplingState:
    """One request as the sampler sees it.

    params: how it samples.
    prompt_ids: its prompt.
    output_ids: its sampled tokens, the caller's own growing list.
    generator: its own random numbers, always on the CPU: what batch it is in, and which device it runs on, change none.
    """

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    generator: torch.Generator

    @classmethod
    def of(cls, params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> "SamplingState":
        """Return the state of a new request, its generator seeded by `params.seed`."""
        generator = torch.Generator(device="cpu")
        if params.seed is None:
            generator.seed()
        else:
            generator.manual_seed(params.seed)
        return cls(params, prompt_ids, output_ids, generator)

    def next_uniform(self) -> float:
        """Return the request's next random number, in [0, 1)."""
        return torch.rand((), dtype=torch.float64, generator=self.generator).item()

    def rewind(self, before: Tensor, used: int) -> None:
        """Set the generator to where it is `used` numbers after the state `before`: those of rejected drafts were not used."""
        self.generator.set_state(before)
        for _ in range(used):
            self.next_uniform()


@dataclass
class SamplingInfo:
    """One sampling call: T rows of logits of the requests of a batch.

    requests: every request of the batch, those that sample nothing in this step included.
    layout: whose rows the T rows are, and their positions.
    drafts: per request its draft tokens; none unless given. Row j of a request is sampled as if
        the first j of them had come, so a request has at most one row more than draft tokens.
    weights: (T, V) float32, what the tokens are sampled from: the probabilities after penalties, grammar, bias and
        temperature, zero outside the filters, not renormalized. The sampler sets it before `after_sample`, so that an
        observer that kept this object as its state can read it there.
    """

    requests: Sequence[SamplingState]
    layout: RowLayout
    drafts: Sequence[Sequence[int]] = ()
    weights: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        counts = self.layout.row_counts
        drafts = self.drafts or [()] * len(self.requests)
        fits = len(counts) == len(self.requests) == len(drafts) and not any(self.layout.prompt_counts)
        if not fits or any(count > len(draft) + 1 for count, draft in zip(counts, drafts, strict=True)):
            raise UsageError(
                "sampling needs a row layout with one entry per request, at most one row and one more per drafted token "
                f"each, none of them a prompt row; found row counts {counts}, prompt counts {self.layout.prompt_counts} "
                f"and drafts of {[len(draft) for draft in drafts]} tokens for {len(self.requests)} requests."
            )
        self.drafts = drafts

    @property
    def row_requests(self) -> list[SamplingState]:
        """Return the request of each row, in order, its output as it is if the drafted tokens before that row come."""
        return [
            replace(request, output_ids=[*request.output_ids, *draft[:row]]) if row else request
            for request, draft, count in zip(self.requests, self.drafts, self.layout.row_counts, strict=True)
            for row in range(count)
        ]

    def asked(self, wants: Callable[[SamplingParams], bool]) -> "AskedRows":
        """Return the rows of the requests whose parameters satisfy `wants`."""
        wanted = [wants(request.params) for request in self.requests]
        counts = tuple(count if want else 0 for want, count in zip(wanted, self.layout.row_counts, strict=True))
        rows = [want for want, count in zip(wanted, self.layout.row_counts, strict=True) for _ in range(count)]
        layout = RowLayout(counts, self.layout.first_positions, (0,) * len(counts))
        return AskedRows(tuple(row for row, want in enumerate(rows) if want), len(rows), layout)


@dataclass(frozen=True)
class AskedRows:
    """Some of the T rows of a sampling call: their numbers, T, and whose they are."""

    rows: tuple[int, ...]
    total: int
    layout: RowLayout

    def of(self, tensor: Tensor) -> Tensor:
        """Return these rows of a (T, ...) tensor; the tensor itself if they are all of them."""
        if len(self.rows) == self.total:
            return tensor
        return tensor.index_select(0, torch.tensor(self.rows, dtype=torch.int64, device=tensor.device))
