"""The final norm, lm_head and embeddings of the captured model, asked for where a layout needs them."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...models.checked_record import of_type
from ...models.checkpoint import fingerprint
from ...models.head import Head, has_head, load_head, load_head_config
from ..store import TapsDescription
from .errors import FormatError

# What models do to logits beside lm_head, under the names that their configs give it; 1 means nothing is done.
LOGIT_FIELDS = (
    "dim_model_base",
    "final_logit_softcapping",
    "lm_head_multiplier",
    "logit_scale",
    "logits_scaling",
    "logits_soft_cap",
    "mup_width_multiplier",
    "output_logit_soft_cap",
    "output_multiplier",
    "softcap",
)


class HeadFolder:
    """A folder that `--head` wrote, which may be missing; read at the first need.

    Raises, from everything that it is asked for, FormatError naming what needs it where it is not there.
    """

    def __init__(self, path: Path, taps: TapsDescription, *, trust_remote_code: bool = False) -> None:
        self.path, self._taps, self._trust_remote_code = path, taps, trust_remote_code

    @property
    def is_there(self) -> bool:
        return has_head(self.path)

    @cached_property
    def fingerprint(self) -> str | None:
        """Equal for equal heads; None without one."""
        return fingerprint(self.path) if self.is_there else None

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return the text decoder's part of the model's config."""
        whole = load_head_config(self.path)
        config: dict[str, Any] = whole.get("text_config") or whole
        for name, expected in (("hidden_size", self._taps.H), ("num_hidden_layers", self._taps.n)):
            if config.get(name, expected) != expected:
                raise FormatError(
                    f"{self.path} is the head of another model: {name} is {config[name]} there and {expected} in the capture."
                )
        return config

    @property
    def model_type(self) -> str:
        """What transformers calls the whole model's kind."""
        return str(load_head_config(self.path)["model_type"])

    @property
    def vocab_size(self) -> int | None:
        """As the config states it; None without a head."""
        if not self.is_there or "vocab_size" not in self.config:
            return None
        try:
            return of_type(int, self.config["vocab_size"])
        except TypeError as error:
            raise FormatError(f"the config of the head in {self.path} is damaged: vocab_size: {error}") from error

    def norm(self, needed_for: str) -> nn.Module:
        """Return (..., H) post-norm states of (..., H) pre-norm states."""
        return self._required("norm", self._head(needed_for).norm, needed_for)

    def lm_head(self, needed_for: str) -> nn.Module:
        """Return (..., V) logits of (..., H) post-norm states, equal to the model's.

        Raises:
            FormatError: no head, or a model that changes its logits afterwards.
        """
        module = self._required("lm_head", self._head(needed_for).lm_head, needed_for)
        changed = {name: self.config[name] for name in LOGIT_FIELDS if self.config.get(name) not in (None, 0, 1)}
        if changed:
            raise FormatError(f"{needed_for} needs logits, and this model changes them after lm_head ({changed}).")
        return module

    def weight(self, part: str, needed_for: str) -> Tensor:
        """Return (V, H): the weight of ``lm_head`` or ``embeddings``, which must be all that the part has."""
        head = self._head(needed_for)
        module = self._required(part, head.lm_head if part == "lm_head" else head.embeddings, needed_for)
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or getattr(module, "bias", None) is not None:
            raise FormatError(
                f"{needed_for} holds {part} as one weight; this model's {type(module).__name__} is more than that."
            )
        if weight.shape[-1] != self._taps.H:
            raise FormatError(
                f"{needed_for} wants {part} of width {self._taps.H}; this model's is {tuple(weight.shape)}."
            )
        return weight.detach()

    def _head(self, needed_for: str) -> Head:
        if not self.is_there:
            raise FormatError(
                f"{needed_for} needs the model's head, and {self.path} holds none. Capture again with --head, or give a head "
                "folder of the same model by --head DIR."
            )
        _ = self.config
        return self._loaded

    @cached_property
    def _loaded(self) -> Head:
        return load_head(self.path, trust_remote_code=self._trust_remote_code)

    def _required(self, part: str, module: nn.Module | None, needed_for: str) -> nn.Module:
        if module is None:
            raise FormatError(f"{needed_for} needs the model's {part}, and the head in {self.path} has none.")
        return module
