"""vLLM itself, opened for hidden states and closed again."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .....models.errors import RunError
from .....models.model_source import ModelSource, first_line
from ...attached_model import AttachedModel
from ...settings import CaptureSettings
from .arena import ArenaShape, RowArena
from .asked_states import AskedStates
from .pieces import ROW

# vLLM reads them when it is imported. One process: the rows need no second one, and its errors are seen here.
# The positions past the model's own that `max_model_len` makes room for are never computed.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
}
# A CPU's memory is not vLLM's own to fill, as an accelerator's is.
_CPU_CACHE_BYTES = 2 << 30
_STEP_TOKENS = 4096
_FAILURES = (
    ValueError,
    RuntimeError,
    NotImplementedError,
    OSError,
    TypeError,
    AssertionError,
    AttributeError,
    ImportError,
)


@dataclass(frozen=True)
class Vllm:
    """A `vllm.LLM` that is open.

    Attributes:
        llm: the engine.
        params: vLLM's class of sampling parameters.
        made_with: its version and device, for a header.
    """

    llm: Any
    params: Any
    made_with: dict[str, Any]

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[Any]) -> list[Any]:
        """Return vLLM's output for each of `prompts`, token ids; raises RunError."""
        asked = [{"prompt_token_ids": list(ids)} for ids in prompts]
        try:
            outputs: list[Any] = self.llm.generate(asked, list(params), use_tqdm=False)
        except _FAILURES as error:
            raise RunError(f"vLLM failed in a batch of {len(prompts)} prompts: {_sentence_of(error)}") from error
        return outputs


class StatesOfPrompts:
    """A `vllm.LLM`, asked for prompts' hidden states alone."""

    def __init__(self, vllm: Vllm) -> None:
        self._vllm, self.made_with = vllm, vllm.made_with

    def compute(self, prompts: list[list[int]], rows: list[int]) -> None:
        """Compute each of `prompts` once, its states into the arena from the row of `rows` on; raises RunError."""
        params = [
            self._vllm.params(
                max_tokens=1, temperature=0.0, detokenize=False, extra_args={"kv_transfer_params": {ROW: row}}
            )
            for row in rows
        ]
        self._vllm.generate(prompts, params)


@contextmanager
def opened_for_states(
    source: ModelSource, settings: CaptureSettings, attached: AttachedModel, asked: AskedStates, rows: int, longest: int
) -> Iterator[tuple[StatesOfPrompts, RowArena]]:
    """vLLM with the model of `source`, and the arena that its rows come to, inside the block alone.

    Args:
        rows: most tokens of a batch. longest: most tokens of a sample.

    Raises:
        RunError: vLLM cannot open the model.
    """
    shape = ArenaShape(rows, len(asked.vllm_ids), attached.hidden_size, str(attached.dtype).removeprefix("torch."))
    arena = RowArena.make(shape)
    try:
        with opened_vllm(_arguments(source, settings, asked, arena, longest), "for its hidden states") as vllm:
            yield StatesOfPrompts(vllm), arena
    finally:
        arena.close()


@contextmanager
def opened_vllm(arguments: dict[str, Any], purpose: str) -> Iterator[Vllm]:
    """Open a `vllm.LLM` with these arguments; its processes and memory are held inside the block alone.

    Args:
        purpose: what the model cannot be run for where this fails, such as ``for its hidden states``.

    Raises:
        RunError: vLLM cannot open the model.
    """
    set_num_threads = torch.set_num_threads  # vLLM's CPU build replaces it
    try:
        vllm = _loaded(arguments, purpose)
        try:
            yield vllm
        finally:
            vllm.llm.llm_engine.engine_core.shutdown()
    finally:
        torch.set_num_threads = set_num_threads


def _loaded(arguments: dict[str, Any], purpose: str) -> Vllm:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import vllm
        from vllm.platforms import current_platform

        if current_platform.is_cpu() and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            arguments.setdefault("kv_cache_memory_bytes", _CPU_CACHE_BYTES)
        made_with = {"vllm": vllm.__version__, "device": current_platform.get_device_name()}
        return Vllm(vllm.LLM(**arguments), vllm.SamplingParams, made_with)
    except _FAILURES as error:
        raise RunError(
            f"vLLM cannot run {arguments['model']} {purpose}: {_sentence_of(error)} Other engine options may help, or --engine "
            "hf."
        ) from error


def _arguments(
    source: ModelSource, settings: CaptureSettings, asked: AskedStates, arena: RowArena, longest: int
) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`."""
    return {
        "max_num_batched_tokens": _STEP_TOKENS,
        "enforce_eager": settings.compile == "off",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **settings.engine_options,
        "model": source.name,
        "revision": source.revision,
        "trust_remote_code": source.trust_remote_code,
        "skip_tokenizer_init": True,
        "dtype": arena.shape.dtype,
        # A sample must leave room for the token that is sampled and for the one that vLLM takes to be drafted; neither is run.
        "max_model_len": longest + 2,
        # Every row is computed: none is taken from a prompt that begins alike.
        "enable_prefix_caching": False,
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(asked.vllm_ids)}},
        },
        "kv_transfer_config": {
            "kv_connector": "RowConnector",
            "kv_connector_module_path": f"{__package__}.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"arena": arena.path, "shape": arena.shape.as_json()},
        },
    }


def _sentence_of(error: BaseException) -> str:
    """Return the first line of vLLM's message as a sentence."""
    line = first_line(error)
    return line if line.endswith((".", "!", "?")) else f"{line}."
