"""One generation: a model, how its steps are shared, and what becomes of its prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...models.errors import UsageError
from ..progress import Progress, Silent
from .aborts import Aborts
from .cached_model import CachedModel
from .finish import Decode, Finish, StopConditions
from .generation_loop import GenerationLoop, LoopSettings
from .generation_request import GenerationRequest
from .observers import LogprobObserver, SamplingObserver, TopKLogitsObserver
from .params import SamplingParams
from .prompts import Prompt, prompt_fault
from .request_rows import GenerationColumns
from .result import GenerationResult
from .sampler import Sampler
from .sampling_mask import SamplingMaskObserver
from .step_probes import StepProbes


@dataclass(frozen=True)
class GenerationOptions:
    """How steps are made; see `generate_with_capture` for what each field means."""

    prompt_lookup: int = 0
    prefill_chunk: int | None = None
    max_batch: int = 16
    sampling_mask_max_tokens: int = 4096
    shard_rows: int = 262_144

    def __post_init__(self) -> None:
        for name, least in (("prompt_lookup", 0), ("prefill_chunk", 1), ("max_batch", 1), ("shard_rows", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{name} must be at least {least}; found {value}.")


class GenerationRun:
    """Makes requests of prompts, runs them, and makes results of them."""

    def __init__(
        self, model: CachedModel, options: GenerationOptions, tokenizer: Any, observers: Sequence[SamplingObserver] = ()
    ) -> None:
        self._model, self._options, self._tokenizer = model, options, tokenizer
        masks = SamplingMaskObserver(options.sampling_mask_max_tokens)
        self._sampler = Sampler([masks, LogprobObserver(), TopKLogitsObserver(), *observers])

    def prompt_fault(self, prompt: Prompt) -> str | None:
        """Why the model cannot take a prompt; `None` where it can."""
        return prompt_fault(prompt, self._model.decoder.vocab_rows, self._model.max_positions)

    def requests(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[GenerationRequest]:
        """One request per prompt.

        Raises:
            UsageError: a prompt that the model cannot take, or stop strings without a tokenizer.
        """
        for prompt in prompts:
            fault = self.prompt_fault(prompt)
            if fault is not None:
                raise UsageError(f"prompt {prompt.sample_id}: {fault}.")
        if self._tokenizer is None and any(one.stop for one in params):
            raise UsageError("stop strings need a tokenizer, which tells what text the tokens are.")
        return [self._request(index, *pair) for index, pair in enumerate(zip(prompts, params, strict=True))]

    def columns(self, params: Sequence[SamplingParams]) -> GenerationColumns:
        """The columns of requests with these parameters."""
        model, taps = self._model, self._model.taps
        K = len(taps.boundaries)
        return GenerationColumns.of(
            params, K, model.hidden_size, model.dtype, pre_norm=taps.pre_norm, post_norm=taps.post_norm
        )

    def settings(self, requests: Sequence[GenerationRequest]) -> LoopSettings:
        """How steps are shared, once the model is seen to do what that needs; its taps are attached.

        Raises:
            StepError: it does not.
        """
        options, probes = self._options, StepProbes(self._model)
        probes.require_cached_steps()
        if options.prefill_chunk is not None:
            probes.require_chunks()
        if options.prompt_lookup:
            probes.require_crop()
        ragged = options.max_batch > 1 and len(requests) > 1
        shares = ragged and probes.shares_steps(recording=options.prompt_lookup > 0)
        return LoopSettings(options.max_batch, options.prefill_chunk, options.prompt_lookup, shares)

    def loop(
        self,
        settings: LoopSettings,
        ended: Callable[[GenerationRequest], None],
        aborts: Aborts | None = None,
        progress: Progress | None = None,
    ) -> GenerationLoop:
        """The loop over steps; `ended` is given each request once."""
        return GenerationLoop(self._model, self._sampler, settings, aborts or Aborts(), ended, progress or Silent())

    def result(self, request: GenerationRequest, columns: GenerationColumns, *, keep_rows: bool) -> GenerationResult:
        """What came of a request that has ended."""
        has_rows = keep_rows and request.R > 0
        return GenerationResult(
            index=request.index,
            prompt_ids=request.prompt.token_ids,
            token_ids=tuple(request.token_ids),
            finish=request.finish or Finish("abort"),
            text=None
            if self._tokenizer is None
            else self._tokenizer.decode(request.token_ids, skip_special_tokens=True),
            rows=columns.dense(request) if has_rows else {},
            sampling_mask=columns.sampling_mask(request) if has_rows else None,
            observed=columns.observed(request) if has_rows else {},
        )

    def _request(self, index: int, prompt: Prompt, params: SamplingParams) -> GenerationRequest:
        P, limit = len(prompt.token_ids), self._model.max_positions
        # The last token goes into no forward and needs no position.
        room = params.max_new_tokens if limit is None else limit - P + 1
        stops = StopConditions.of(params, end_token_ids(self._model.model), room, self._decode())
        return GenerationRequest(index, prompt, params, stops, looks_up=self._options.prompt_lookup > 0)

    def _decode(self) -> Decode | None:
        tokenizer = self._tokenizer
        return None if tokenizer is None else lambda token_ids: str(tokenizer.decode(list(token_ids)))


def end_token_ids(model: Any) -> frozenset[int]:
    """The model's own end tokens: those of its generation config, else of its config."""
    for config in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
