"""The seam between a run and its model: a new backend is one package that has a `KIND`, and its line in `ENGINES`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, TypeVar

import torch

from ...models.config import model_types
from ...models.errors import UsageError
from ...models.loaded_model import LoadedModel
from ..engines import ENGINES
from ..progress import Progress
from .attached_model import AttachedModel
from .distributed.ranks import Ranks
from .engine import Engine
from .pacing.pace import Pacer
from .settings import CaptureSettings
from .stopping import Stopping
from .summary import RunSummary

E = TypeVar("E", bound=Engine)


class Backend(Protocol[E]):
    """The model of one run, and how it is opened for forwards.

    Attributes:
        identity: of its `EngineKind`, for these settings.
        takes_images: whether rows with images can be captured.
    """

    @property
    def settings(self) -> CaptureSettings: ...
    @property
    def loaded(self) -> LoadedModel: ...
    @property
    def attached(self) -> AttachedModel: ...
    @property
    def identity(self) -> Mapping[str, Any]: ...
    @property
    def takes_images(self) -> bool: ...

    def engine(self, store_dtype: torch.dtype, longest: int) -> AbstractContextManager[E]:
        """Return the engine, open inside the block, for samples of up to `longest` tokens."""

    def pacer(self, engine: E, tokens: int, note: Callable[[str], None]) -> Pacer:
        """Return what sizes the batches of a run of `tokens` tokens and runs them on `engine`."""


@dataclass(frozen=True)
class EngineKind:
    """One kind of engine, as a run uses it before a model is loaded.

    Attributes:
        refuse: raises UsageError naming the setting, or the missing package, that keeps it from running.
        identity: JSON values of the shard header that a resumed run must agree with: `mode`, one word for how rows are computed,
            and what else of the settings changes values with this engine.
        backend: opens the model of the settings; raises UsageError where it cannot be captured as asked.
        elsewhere: runs the whole capture in processes of its own; None: the processes that call for the run do it.
    """

    refuse: Callable[[CaptureSettings], None]
    identity: Callable[[CaptureSettings], Mapping[str, Any]]
    backend: Callable[[CaptureSettings, Ranks], Backend[Any]]
    elsewhere: Callable[[CaptureSettings, Progress, Stopping], RunSummary] | None = None


def kind_of(settings: CaptureSettings) -> EngineKind:
    """Return the kind of engine that `settings` names; raises UsageError naming what of them it cannot do."""
    kind: EngineKind = import_module(ENGINES[settings.engine].module, __package__).KIND
    kind.refuse(settings)
    return kind


def opened_backend(kind: EngineKind, settings: CaptureSettings, ranks: Ranks) -> Backend[Any]:
    """Open the model of `settings`, and see that the engine will deliver what they ask for.

    Raises:
        UsageError: as `EngineKind.backend`; or the engine would leave out, or do otherwise, what its `refuse` let pass.
    """
    backend = kind.backend(settings, ranks)
    attached, mode = backend.attached, backend.identity.get("mode")
    boundaries = settings.layers.boundaries(
        attached.decoder.n, model_types(getattr(attached.decoder.model, "config", None))
    )
    asked: dict[str, tuple[Any, Any]] = {
        "layers (boundaries)": (boundaries, attached.taps.boundaries),
        "--final": (settings.final, attached.taps.final),
        "--top-logits": (settings.top_logits, attached.top_logits),
        "--exact": (settings.exact, settings.exact and mode == "exact"),
    }
    changed = [
        f"{name}: asked for {wanted}, {found} would be stored"
        for name, (wanted, found) in asked.items()
        if wanted != found
    ]
    if changed:
        raise UsageError(
            f"the engine {settings.engine} does not deliver what was asked for ({'; '.join(changed)}); take --engine hf."
        )
    return backend
