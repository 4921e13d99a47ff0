"""What one sampling call knows of the requests it samples for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...models.errors import UsageError
from ..outputs import RowLayout
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
        """The state of a new request, its generator seeded by `params.seed`."""
        generator = torch.Generator(device="cpu")
        if params.seed is None:
            generator.seed()
        else:
            generator.manual_seed(params.seed)
        return cls(params, prompt_ids, output_ids, generator)


@dataclass
class SamplingInfo:
    """One sampling call: T rows of logits, at most one per request of the batch.

    requests: every request of the batch, those that sample nothing in this step included.
    layout: whose rows the T rows are, and their positions.
    weights: (T, V) float32, what the tokens are sampled from: the probabilities after penalties, grammar, bias and
        temperature, zero outside the filters, not renormalised. The sampler sets it before `after_sample`, so that an
        observer that kept this object as its state can read it there.
    """

    requests: Sequence[SamplingState]
    layout: RowLayout
    weights: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        counts = self.layout.row_counts
        if len(counts) != len(self.requests) or any(count > 1 for count in counts) or any(self.layout.prompt_counts):
            raise UsageError(
                "sampling needs a row layout with one entry per request, 0 or 1 rows each, none of them a prompt row; "
                f"found row counts {counts} and prompt counts {self.layout.prompt_counts} for {len(self.requests)} requests."
            )

    @property
    def row_requests(self) -> list[SamplingState]:
        """The requests that sample in this step, in the order of their rows."""
        return [request for request, count in zip(self.requests, self.layout.row_counts, strict=True) if count]

    def asked(self, wants: Callable[[SamplingParams], bool]) -> "AskedRows":
        """The rows of the requests whose parameters satisfy `wants`."""
        wanted = [wants(request.params) for request in self.requests]
        row_wanted = [want for want, count in zip(wanted, self.layout.row_counts, strict=True) if count]
        counts = tuple(int(bool(count and want)) for count, want in zip(self.layout.row_counts, wanted, strict=True))
        layout = RowLayout(counts, self.layout.first_positions, (0,) * len(counts))
        return AskedRows(tuple(row for row, want in enumerate(row_wanted) if want), len(row_wanted), layout)


@dataclass(frozen=True)
class AskedRows:
    """Some of the T rows of a sampling call: their numbers, T, and whose they are."""

    rows: tuple[int, ...]
    total: int
    layout: RowLayout

    def of(self, tensor: Tensor) -> Tensor:
        """These rows of a (T, ...) tensor; the tensor itself where they are all of them."""
        if len(self.rows) == self.total:
            return tensor
        return tensor.index_select(0, torch.tensor(self.rows, dtype=torch.int64, device=tensor.device))
