"""The layers requested from a run: ids, a draft model's config, or an algorithm's default."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from .default_ids import default_ids
from .draft_config import read_draft_config
from .errors import UsageError
from .id_systems import boundaries_of, system_named
from .layer_ids import (
    CONVENTIONS,
    Algorithm,
    Convention,
    LayerIdError,
    check_plain_ids,
    from_boundaries,
    to_boundaries,
)


@dataclass(frozen=True)
class LayerChoice:
    """One way of naming layers.

    Attributes:
        ids: of `system`.
        convention: one of the two systems that belong to no engine, by its older option; not beside `system`.
        system: whose ids `ids` or those of `draft_config` are; see `models.id_systems`. Without either: ``layer_output``.
        draft_config: a drafter's config.json, which names its target layers.
        algorithm: take its default layers; those of `system`, where one is named.
    """

    ids: Sequence[int] | None = None
    convention: Convention | None = None
    system: str | None = None
    draft_config: Path | None = None
    algorithm: Algorithm | None = None

    def __post_init__(self) -> None:
        if self.convention is not None and self.convention not in CONVENTIONS:
            raise UsageError(
                f"unknown layer-id convention {self.convention!r}; expected one of {', '.join(CONVENTIONS)}."
            )
        if self.convention is not None and self.system is not None:
            raise UsageError(
                f"what the layer ids mean was named twice: convention {self.convention} (--convention) and system {self.system} "
                "(--ids-of); give one of them."
            )
        if self.system is not None:
            system_named(self.system)
        named = [name for name in ("ids", "draft_config", "algorithm") if getattr(self, name) is not None]
        if len(named) > 1:
            raise UsageError(f"layers were named in {len(named)} ways ({', '.join(named)}); give one of them.")
        if self.algorithm is not None and self.algorithm not in get_args(Algorithm):
            raise UsageError(f"unknown algorithm {self.algorithm!r}; expected one of {', '.join(get_args(Algorithm))}.")
        if self.draft_config is not None and self._named_system is None:
            raise UsageError(
                "a draft config does not say what its ids mean; name whose they are (--ids-of vllm, specforge, ...)."
            )

    @property
    def _named_system(self) -> str | None:
        return self.system or self.convention

    @property
    def called(self) -> str:
        """What messages about these layers begin with: the algorithm that they are for, DSPARK where none is named."""
        return (self.algorithm or "dspark").upper()

    def require_named(self) -> None:
        """Raise LayerIdError or LayerIdTypeError unless plain, increasing ids, a draft config or an algorithm are there."""
        if self.ids is None and self.draft_config is None and self.algorithm is None:
            raise LayerIdError(
                "DSPARK requires explicit layer_ids for aux hidden capture. Name them by ids (--layer-ids), an algorithm "
                "(--algorithm) or a draft config (--draft-config)."
            )
        if self.ids is not None:
            check_plain_ids(self.ids, algorithm=self.system or "DSPARK")

    def boundaries(self, n: int, model_types: Collection[str] = ()) -> tuple[int, ...]:
        """Return the boundaries to tap in a model of n layers.

        Args:
            model_types: ``model_type`` of the model's config and of its text config, by which some engines read ids.

        Raises:
            LayerIdError, LayerIdTypeError: ids that name no layers, or a state that is no boundary.
            DraftConfigError: a draft config that names none, or is for another target.
        """
        self.require_named()
        system = self._named_system or "layer_output"
        if self.algorithm is not None:
            return boundaries_of(
                default_ids(system, self.algorithm, n, model_types=model_types), n, system, model_types
            )
        if self.draft_config is not None:
            return read_draft_config(self.draft_config).boundaries(n, system, model_types)
        if system == "layer_output":
            return to_boundaries(self.ids, n, "layer_output")
        if system == "boundary":
            return to_boundaries(self.ids, n, "boundary")
        return boundaries_of(self.ids, n, system, model_types)

    def as_ids(self, boundaries: tuple[int, ...]) -> tuple[tuple[int, ...], Convention]:
        """Return `boundaries` as ids, and their convention: ``boundary`` where it was asked for or alone names them all."""
        asked: Convention = "boundary" if self._named_system == "boundary" else "layer_output"
        convention: Convention = "boundary" if 0 in boundaries else asked
        return from_boundaries(boundaries, convention), convention
