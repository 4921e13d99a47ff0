"""Which layers a run is asked for: ids, a drafter's config, or an algorithm's default."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from ...models.default_ids import default_ids
from ...models.draft_config import read_draft_config
from ...models.errors import UsageError
from ...models.id_systems import boundaries_of
from ...models.layer_ids import CONVENTIONS, Algorithm, Convention, LayerIdError, from_boundaries, to_boundaries


@dataclass(frozen=True)
class LayerChoice:
    """One way of naming layers.

    Attributes:
        ids: under `convention`, or under `system` where one is named.
        system: whose ids `ids` or those of `draft_config` are; see `models.id_systems`.
        draft_config: a drafter's config.json, which names its target layers.
        algorithm: take its default layers; those of `system`, where one is named.
    """

    ids: tuple[int, ...] | None = None
    convention: Convention = "layer_output"
    system: str | None = None
    draft_config: Path | None = None
    algorithm: Algorithm | None = None

    def __post_init__(self) -> None:
        if self.convention not in CONVENTIONS:
            raise UsageError(
                f"unknown layer-id convention {self.convention!r}; expected one of {', '.join(CONVENTIONS)}."
            )
        named = [name for name in ("ids", "draft_config", "algorithm") if getattr(self, name) is not None]
        if len(named) > 1:
            raise UsageError(f"layers were named in {len(named)} ways ({', '.join(named)}); give one of them.")
        if self.algorithm is not None and self.algorithm not in get_args(Algorithm):
            raise UsageError(f"unknown algorithm {self.algorithm!r}; expected one of {', '.join(get_args(Algorithm))}.")
        if self.draft_config is not None and self.system is None:
            raise UsageError(
                "a draft config does not say what its ids mean; name whose they are (--ids-of vllm, specforge, ...)."
            )

    def boundaries(self, n: int) -> tuple[int, ...]:
        """The boundaries to tap in a model of n layers.

        Raises:
            LayerIdError, LayerIdTypeError: ids that name no layers, or a state that is no boundary.
            DraftConfigError: a draft config that names none, or is for another target.
        """
        if self.ids is None and self.draft_config is None and self.algorithm is None:
            raise LayerIdError(
                "DSPARK requires explicit layer_ids for aux hidden capture. Name them by ids (--layer-ids), an algorithm "
                "(--algorithm) or a draft config (--draft-config)."
            )
        if self.algorithm is not None:
            system = self.system or "layer_output"
            return boundaries_of(default_ids(system, self.algorithm, n), n, system)
        if self.draft_config is not None and self.system is not None:
            return read_draft_config(self.draft_config).boundaries(n, self.system)
        if self.system is not None:
            return boundaries_of(self.ids, n, self.system)
        return to_boundaries(self.ids, n, self.convention)

    def told(self, boundaries: tuple[int, ...]) -> tuple[tuple[int, ...], Convention]:
        """`boundaries` as ids, and the convention they are told in: ours, but ``boundary`` where only that names them all."""
        convention: Convention = "boundary" if 0 in boundaries else self.convention
        return from_boundaries(boundaries, convention), convention
