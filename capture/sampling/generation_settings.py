"""Settings of one generation over a data set."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...models.choices import Turns
from ..engines import ENGINES, require_engine
from ..settings import FolderSettings, InputSettings, LayerSettings, RunPlaces
from .generation.run import GenerationOptions
from .sampler.params import SamplingParams


@dataclass(frozen=True)
class GenerationSettings(FolderSettings, LayerSettings, RunPlaces):
    """One generation over a data set, in the groups of a capture.

    Attributes:
        params: of every row; row i samples with its seed + i.
        options: how steps are made.
        text: which rows are read, and how a conversation is rendered.
        drop_truncated: whether samples with an answer that ended by length are rejected.
        turns: which of the assistant's turns are written anew: the ``last`` one, or ``all``.
        engine: what writes them: ``hf`` or ``vllm``.
        engine_options: arguments of `vllm.LLM`.

    Raises:
        UsageError: a value that cannot be used.
    """

    params: SamplingParams = field(default_factory=SamplingParams, kw_only=True)
    options: GenerationOptions = field(default_factory=GenerationOptions, kw_only=True)
    text: InputSettings = field(default_factory=InputSettings, kw_only=True)
    drop_truncated: bool = field(default=False, kw_only=True)
    turns: Turns = field(default="last", kw_only=True)
    engine: str = field(default="hf", kw_only=True)
    engine_options: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_engine(self.engine, self.engine_options)

    @property
    def rows_of_steps(self) -> bool:
        """Whether the rows are those of the steps; else they come from a forward over the finished samples."""
        return self.turns == "last" and ENGINES[self.engine].steps


def drawn_seed(params: SamplingParams) -> int:
    """Return the seed of the first row; one that is drawn now is kept, for a resumed run to draw the same numbers."""
    if params.seed is not None:
        return params.seed
    return 0 if params.is_greedy else secrets.randbits(62)
