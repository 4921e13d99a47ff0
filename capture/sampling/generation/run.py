"""One generation: a model, how its steps are shared, and what becomes of its prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ....models.checked_fields import CheckedFields
from ....models.errors import UsageError
from ...data.chat.template import ChatTemplate
from ...progress import Progress, Silent
from ..sampler.observers import LogprobObserver, SamplingObserver, TopKLogitsObserver
from ..sampler.params import SamplingParams
from ..sampler.sampler import Sampler
from ..sampler.sampling_mask import SamplingMaskObserver
from .cached_model import CachedModel
from .end_marks import EndMarks
from .finish import Aborts, Decode, Finish, StopConditions
from .loop import GenerationLoop, LoopSettings
from .prompts import Prompt, prompt_fault
from .request import GenerationRequest
from .request_rows import GenerationColumns
from .result import GenerationResult
from .step_probes import StepProbes


@dataclass(frozen=True)
class GenerationOptions(CheckedFields):
    """Settings of the steps; `generate_with_capture` explains each field."""

    prompt_lookup: int = 0
    prefill_chunk: int | None = None
    max_batch: int = 16
    sampling_mask_max_tokens: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(prompt_lookup=0, prefill_chunk=1, max_batch=1, sampling_mask_max_tokens=1)


class GenerationRun:
    """Makes requests of prompts, runs them, and makes results of them."""

    def __init__(
        self,
        model: CachedModel,
        options: GenerationOptions,
        tokenizer: Any,
        observers: Sequence[SamplingObserver] = (),
        template: ChatTemplate | None = None,
    ) -> None:
        """`template`: that prompts are rendered with, where it is not the tokenizer's own."""
        self._model, self._options, self._tokenizer = model, options, tokenizer
        self.end_marks = EndMarks.of(model.model, tokenizer, template)
        masks = SamplingMaskObserver(options.sampling_mask_max_tokens)
        self._sampler = Sampler([masks, LogprobObserver(), TopKLogitsObserver(), *observers])

    def prompt_fault(self, prompt: Prompt, params: SamplingParams) -> str | None:
        """Return why the model cannot take a prompt, or continue it as far as `params` allow; `None` if it can."""
        most = self._model.max_positions
        fault = prompt_fault(prompt, self._model.tapped.decoder.vocab_rows, most)
        return fault if fault is not None else self._length_fault(len(prompt.token_ids), params, most)

    def _length_fault(self, P: int, params: SamplingParams, most: int | None) -> str | None:
        """Return why a sequence crosses a length at which its rotary frequencies change; `None` if it does not."""
        limits, options = self._model.tapped.limits, self._options
        # The last token goes into no forward; rejected draft tokens were in one.
        end = P + params.max_new_tokens - 1
        reach = (end if most is None else min(end, most)) + options.prompt_lookup
        for cut in limits.cuts:
            if P <= cut < reach:
                room = cut - P + 1 - options.prompt_lookup
                return (
                    f"{P} prompt tokens and up to {params.max_new_tokens} new ones cross {cut} positions, where the model "
                    f"changes its rotary frequencies and with them every earlier row; ask for at most {max(room, 0)} new tokens "
                    f"(max_new_tokens), or give a prompt of more than {cut}"
                )
            if cut < P and options.prefill_chunk is not None and options.prefill_chunk < P:
                return (
                    f"{P} prompt tokens are more than {cut}, past which the model changes its rotary frequencies, so they cannot "
                    "be run in chunks; leave prefill_chunk out"
                )
        past = limits.unsteady_past
        if past is not None and reach > past:
            return (
                f"{P} prompt tokens and up to {params.max_new_tokens} new ones pass {past} positions, from where on the model "
                "computes other rotary frequencies for every length; ask for fewer new tokens (max_new_tokens)"
            )
        selects = limits.selects_past
        if selects is not None and reach > selects:
            return (
                f"{P} prompt tokens and up to {params.max_new_tokens} new ones pass {selects} positions, from where on the model "
                "selects the positions that it attends to and rounding decides between near ties, so rows of steps are not those "
                f"of the whole sequence; ask for at most {max(selects - P - options.prompt_lookup + 1, 0)} new tokens "
                "(max_new_tokens)"
            )
        return None

    def requests(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[GenerationRequest]:
        """Return one request per prompt.

        Raises:
            UsageError: a prompt that the model cannot take, or stop strings without a tokenizer.
        """
        for prompt, own in zip(prompts, params, strict=True):
            fault = self.prompt_fault(prompt, own)
            if fault is not None:
                raise UsageError(f"prompt {prompt.sample_id}: {fault}.")
        if self._tokenizer is None and any(one.stop for one in params):
            raise UsageError("stop strings need a tokenizer, which tells what text the tokens are.")
        return [self._request(index, *pair) for index, pair in enumerate(zip(prompts, params, strict=True))]

    def columns(self, params: Sequence[SamplingParams]) -> GenerationColumns:
        """Return the columns of requests with these parameters."""
        return GenerationColumns.of(params, self._model.tapped)

    def settings(self, requests: int) -> LoopSettings:
        """Check that the model, its taps attached, can do what the options need; return how so many requests share steps.

        Raises:
            StepError: it does not.
        """
        options, probes = self._options, StepProbes(self._model)
        probes.require_cached_steps()
        if options.prefill_chunk is not None:
            probes.require_chunks()
        if options.prompt_lookup:
            probes.require_crop()
        # Empty slots in front of a shorter request are columns too.
        by_column = self._model.tapped.limits.scales_from is not None
        ragged = options.max_batch > 1 and requests > 1 and not by_column
        shares = ragged and probes.shares_steps(recording=options.prompt_lookup > 0)
        return LoopSettings(options.max_batch, options.prefill_chunk, options.prompt_lookup, shares)

    def loop(
        self,
        settings: LoopSettings,
        ended: Callable[[GenerationRequest], None],
        aborts: Aborts | None = None,
        progress: Progress | None = None,
    ) -> GenerationLoop:
        """Return the loop over steps; `ended` is given each request once."""
        return GenerationLoop(self._model, self._sampler, settings, aborts or Aborts(), ended, progress or Silent())

    def result(self, request: GenerationRequest, columns: GenerationColumns, *, keep_rows: bool) -> GenerationResult:
        """Return the result of a finished request."""
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
        stops = StopConditions.of(params, self.end_marks.token_ids, room, self._decode())
        return GenerationRequest(index, prompt, params, stops, looks_up=self._options.prompt_lookup > 0)

    def _decode(self) -> Decode | None:
        tokenizer = self._tokenizer
        return None if tokenizer is None else lambda token_ids: str(tokenizer.decode(list(token_ids)))
