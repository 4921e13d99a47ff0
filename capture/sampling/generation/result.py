"""The result of one prompt."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ....models.errors import RunError
from ...outputs import RaggedRows
from .finish import Finish, FinishKind


@dataclass(frozen=True, eq=False)
class GenerationResult:
    """One prompt and the model's answer to it.

    A prompt of P tokens and G new ones have R = P + G - 1 rows (P where G is 0). Row t is the forward at position t, and the
    token sampled from it is in row t of `output_ids`. The last new token went into no forward: it is in `output_ids` alone.

    Attributes:
        index: its place among the prompts.
        prompt_ids: the P tokens.
        token_ids: the G new tokens, the one that ended the request included.
        finish: why it ended.
        text: the new tokens as text, special ones left out; `None` without a tokenizer.
        rows: by column, (R, ...): `input_ids` int32, `loss_mask` uint8 (1 on new tokens), `aux_hidden_states` (R, K, H),
            `pre_norm`, `post_norm` (R, H), `output_ids` int32 (-1 where nothing was sampled), and as asked `sampling_logprobs`,
            `logprobs` float32, `topk_logits` float32 and `topk_ids` int32 (R, k), `topk_logsumexp` float32; NaN or -1 where
            nothing was sampled. Empty where rows were not to be kept.
        sampling_mask: (R,) lists of int32: the support of each row's token; `None` where no request of the run asked.
        observed: columns that the caller's own observers recorded: a row for each new token, from row P - 1 on.

    Example:
        >>> params = SamplingParams(max_new_tokens=2, ignore_eos=True)
        >>> [result] = generate_with_capture(model, [[5, 6, 7]], params, layer_ids=[1])
        >>> result.finish_reason, len(result.token_ids), result.rows["loss_mask"]
        ('length', 2, tensor([0, 0, 0, 1], dtype=torch.uint8))
    """

    index: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish: Finish
    text: str | None
    rows: Mapping[str, Tensor]
    sampling_mask: RaggedRows | None
    observed: Mapping[str, Tensor]

    @property
    def finish_reason(self) -> FinishKind:
        """`stop_token`, `stop_string`, `length`, `abort` or `refused`."""
        return self.finish.kind

    @property
    def aux_hidden_states(self) -> Tensor:
        """Return (R, K, H)."""
        return self._column("aux_hidden_states")

    @property
    def input_ids(self) -> Tensor:
        """Return (R,) int32."""
        return self._column("input_ids")

    @property
    def output_ids(self) -> Tensor:
        """Return (R,) int32."""
        return self._column("output_ids")

    def _column(self, name: str) -> Tensor:
        if name not in self.rows:
            raise RunError(f"result {self.index} has no rows of {name!r}; it has {sorted(self.rows)}.")
        return self.rows[name]
