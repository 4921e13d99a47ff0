"""Kimi models with the mixin: ``KimiLinearForCausalLM.from_pretrained(...)`` and the setters are there at once.

Each class bears the name of the one it extends, so that `save_pretrained` writes what transformers itself would. K2 checkpoints
load as a DeepSeek-V3. Kimi K3 comes with code of its own: load it and call `with_capture`, with `capture_adapter` set.
"""

from __future__ import annotations

import transformers

from .mixin import HiddenStateCaptureMixin


class KimiLinearForCausalLM(HiddenStateCaptureMixin, transformers.KimiLinearForCausalLM):  # type: ignore[misc]
    """Kimi Linear."""


class DeepseekV3ForCausalLM(HiddenStateCaptureMixin, transformers.DeepseekV3ForCausalLM):  # type: ignore[misc]
    """Kimi K2, and the text model of K2.5."""


class Kimi_K25ForConditionalGeneration(  # noqa: N801 - transformers' own name
    HiddenStateCaptureMixin,
    transformers.Kimi_K25ForConditionalGeneration,  # type: ignore[misc]
):
    """Kimi K2.5."""
