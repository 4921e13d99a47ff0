"""From post-norm rows to the model's logits: the head, and what the model does after it, proven on the running model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..models.call import eagerly, few_ids, input_device, without_cache
from ..models.config import model_config, text_config
from ..models.decoder import Decoder
from .collector import Collector
from .errors import TapError
from .slots import ClonedStates
from .taps import Taps

# Logits of a chunk of rows are held at once, never those of a whole batch.
CHUNK_BYTES = 1 << 26


@dataclass(frozen=True)
class TopLogits:
    """The largest logits of T rows.

    Attributes:
        values, ids: (T, k) float32 and int32, by descending logit; NaN and -1 in places behind a cut by top-p.
        logsumexp: (T,) float32 over the whole vocabulary: exp(values - logsumexp) are probabilities, and what they leave to 1 is
            the tail.
    """

    values: Tensor
    ids: Tensor
    logsumexp: Tensor


@dataclass(frozen=True)
class LogitsHead:
    """The head of a model, which turns post-norm rows into logits."""

    lm_head: nn.Module
    after: Callable[[Tensor], Tensor]

    def top(self, post_norm: Tensor, k: int, p: float = 1.0) -> TopLogits:
        """Return the k largest logits of each row of (T, H), in chunks of rows.

        p: of these, keep the fewest whose probabilities, over the whole vocabulary, add up to p or more; all k where they do not.
        """
        parts = [self._top(rows, k, p) for rows in self._chunks(post_norm)]
        values, ids, sums = (torch.cat(column) for column in zip(*parts, strict=True))
        return TopLogits(values, ids, sums)

    def logits(self, post_norm: Tensor) -> Tensor:
        """Return (..., V) logits of (..., H) states, in the model's own dtype."""
        return self.after(self.lm_head(post_norm))

    def _top(self, rows: Tensor, k: int, p: float) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.logits(rows).float()
        values, ids = logits.topk(k, dim=-1)
        total = logits.logsumexp(-1)
        if p < 1:
            probabilities = (values - total[:, None]).exp()
            # What comes before a place is summed, so the token that crosses p is kept.
            cut = probabilities.cumsum(-1) - probabilities >= p
            values, ids = values.masked_fill(cut, torch.nan), ids.masked_fill(cut, -1)
        return values, ids.to(torch.int32), total

    def _chunks(self, rows: Tensor) -> Iterator[Tensor]:
        return iter(torch.split(rows, max(CHUNK_BYTES // (4 * self.vocabulary), 1)))

    @property
    def vocabulary(self) -> int:
        """V"""
        return int(cast(Tensor, self.lm_head.weight).shape[0])


@torch.no_grad()
def find_logits_head(decoder: Decoder, norm: nn.Module) -> LogitsHead:
    """Find how `decoder`'s model makes logits from what its final norm gives out, by running it once on a few tokens.

    Raises:
        TapError: the model has no head, or none of the known steps from its head gives the model's logits.
    """
    model: Any = decoder.model
    lm_head = model.get_output_embeddings()
    if lm_head is None:
        raise TapError(f"{type(model).__name__} has no head that gives logits, so top logits cannot be taken from it.")
    ids = few_ids(model, decoder.vocab_rows, 2, 5).to(input_device(model))
    collector, slots = Collector(decoder, Taps((), "post"), norm), ClonedStates(1)
    collector.attach()
    try:
        with collector.armed(slots, 2, 5), eagerly(model):
            logits = model(ids, **without_cache(model)).logits
    finally:
        collector.detach()
    post_norm = slots.states[0]
    if post_norm is not None:
        made = lm_head(post_norm)
        for after in _known_steps(text_config(model_config(model))):
            if torch.allclose(after(made).float(), logits.float(), rtol=1e-5, atol=1e-5):
                return LogitsHead(lm_head, after)
    raise TapError(
        f"the logits of {type(model).__name__} are not its head applied to the final norm's output, nor that scaled or "
        "soft-capped as its config says, so top logits cannot be taken from stored rows."
    )


@dataclass(frozen=True)
class Scaled:
    """Logits times a factor (Cohere's logit_scale, Granite's 1 / logits_scaling)."""

    factor: float

    def __call__(self, logits: Tensor) -> Tensor:
        return logits * self.factor


@dataclass(frozen=True)
class SoftCapped:
    """Logits bent towards a cap (Gemma 2)."""

    cap: float

    def __call__(self, logits: Tensor) -> Tensor:
        return torch.tanh(logits / self.cap) * self.cap


_STEPS: tuple[tuple[str, Callable[[float], Callable[[Tensor], Tensor]]], ...] = (
    ("logit_scale", Scaled),
    ("logits_scaling", lambda value: Scaled(1.0 / value)),
    ("final_logit_softcapping", SoftCapped),
    ("logits_soft_cap", SoftCapped),
    ("output_logit_soft_cap", SoftCapped),
)


def _known_steps(config: Any) -> Iterator[Callable[[Tensor], Tensor]]:
    # What the config states comes first: on small logits a soft cap cannot be told from nothing.
    for name, step in _STEPS:
        value = getattr(config, name, None)
        if isinstance(value, (int, float)) and value:
            yield step(float(value))
    yield Scaled(1.0)
