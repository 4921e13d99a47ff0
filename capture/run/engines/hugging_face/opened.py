"""A Hugging Face model opened in this process, whole or layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .....hooks import Collector
from .....models.loaded_model import LoadedModel
from ...attached_model import AttachedModel
from ...settings import CaptureSettings
from .engine import identity_of_mode


@dataclass(frozen=True)
class OpenedModel:
    """A model and the taps to put on it.

    Whether its layers are in memory changes no row, so `identity` is one: either kind of run resumes the other.
    """

    settings: CaptureSettings
    loaded: LoadedModel
    attached: AttachedModel
    collector: Collector

    @property
    def identity(self) -> Mapping[str, Any]:
        return identity_of_mode(self.settings)
