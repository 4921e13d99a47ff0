"""A loaded model, with the provenance that the files of a run record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from .checkpoint import fingerprint
from .errors import RunError
from .model_source import ModelSource
from .published_form import PublishedForm


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, and what is known of where it came from.

    Attributes:
        model: on its device, without gradients.
        folder: where its files are.
        config_hash, weights: sha256 of its config and fingerprint of its weight files.
        revision: commit hash of a hub model, None for a folder.
        weights_dtype: dtype of most of its weights, such as ``bfloat16``.
        notes: what the config says and the checkpoint does not, in words.
        form: how the checkpoint stores its weights.
        peft_adapter: sha256 of the adapter that is applied, None without one.
    """

    model: nn.Module
    source: ModelSource
    folder: Path
    config_hash: str
    weights: str
    revision: str | None
    weights_dtype: str
    notes: tuple[str, ...]
    form: PublishedForm
    peft_adapter: str | None = None

    @property
    def published(self) -> dict[str, Any]:
        """What of the checkpoint's form decides over the values, as JSON values; {} for plain weights."""
        found: dict[str, Any] = {"peft_adapter_sha256": self.peft_adapter} if self.peft_adapter else {}
        if self.source.peft:  # `none` too: a comparison would load the adapter beside the weights
            found["peft_adapter"] = self.source.peft_place
        if self.form.is_quantized:
            found["quantization"] = self.form.as_json(kept=self.source.keep_quantized)
        return found

    def require_unchanged(self) -> None:
        """Raise RunError where the weight files are not those any more that were loaded: mapped weights follow their file."""
        if fingerprint(self.folder) != self.weights:
            raise RunError(
                f"the weights in {self.folder} changed while they were in use; what was computed cannot be trusted."
            )
