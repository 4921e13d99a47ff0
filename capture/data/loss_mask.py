"""The loss mask of a conversation, by one of three rules."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...models.errors import UsageError
from .generation_marks import has_marks, marked_spans
from .rendering import Rendering
from .substitution import TurnFinder
from .template import ChatTemplate, Span, Tools
from .token_mask import mask_of_spans
from .tool_calls import calls_outside_turns

GENERATION_MARKS, SUBSTITUTION, ALL = "generation_marks", "substitution", "all"
ROW, KIMI_TOKENS = "row", "kimi_tokens"


@dataclass(frozen=True, eq=False)
class Masked:
    """`loss_mask`: (S,) uint8, unshifted; the rule that made it; short warning codes."""

    loss_mask: npt.NDArray[np.uint8]
    rule: str
    warnings: frozenset[str]


class LossMasks:
    """Makes masks for one template. `loss_on` is `assistant` or `all`."""

    def __init__(self, template: ChatTemplate, loss_on: str) -> None:
        self._template = template
        self._loss_on = loss_on
        self._finder = TurnFinder(template)

    def rule(self, tools: Tools = None) -> str:
        """The rule that holds for conversations with or without tools."""
        if self._loss_on == "all":
            return ALL
        return GENERATION_MARKS if has_marks(self._template.source(tools)) else SUBSTITUTION

    def mask(self, rendering: Rendering, tokens: int, offsets: npt.NDArray[np.int64] | None) -> Masked:
        """The mask over the S `tokens` of a conversation.

        `offsets`: (S, 2) int64, characters of each token; None where the tokenizer cannot tell.
        Raises RowError where the rule cannot tell the turns, UsageError where it needs offsets and there are none.
        """
        rule = self.rule(rendering.conversation.tools)
        if rule == ALL:
            return Masked(np.ones(tokens, np.uint8), rule, frozenset())
        if offsets is None:
            raise UsageError(
                "expected a tokenizer that tells the characters of each token (a fast one); this one does not, so "
                "assistant turns cannot be marked; use its fast version, or supervise everything (--loss-on all)"
            )
        spans, warnings = self._spans(rule, rendering)
        token_mask = mask_of_spans(rendering.text, offsets, spans)
        if token_mask.straddled:
            warnings |= {"token_straddles_span"}
        return Masked(token_mask.loss_mask, rule, warnings)

    def _spans(self, rule: str, rendering: Rendering) -> tuple[Sequence[Span], frozenset[str]]:
        if rule == GENERATION_MARKS:
            return marked_spans(self._template, rendering), frozenset()
        turns = self._finder.turns(rendering)
        outside = calls_outside_turns(self._template, rendering, turns)
        found = (("content_changed", turns.changed), ("tool_calls_not_supervised", outside))
        return turns.spans, frozenset(code for code, holds in found if holds)
