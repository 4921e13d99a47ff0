"""`generate_with_capture`: sample from a model, and keep what every forward position showed."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from ...hooks import Final
from ...models.errors import UsageError
from ...models.layer_ids import Convention
from ..progress import Progress, Silent, Work
from .aborts import Aborts
from .cached_model import cached_model, takes_nothing
from .generation_request import GenerationRequest
from .generation_run import GenerationOptions, GenerationRun
from .observers import SamplingObserver
from .params import SamplingParams
from .prompts import PromptLike, prompts_of
from .result import GenerationResult
from .run_identity import generation_identity
from .shard_sink import shard_sink


def generate_with_capture(
    model: nn.Module,
    prompts: Sequence[PromptLike],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    layer_ids: Sequence[int],
    convention: Convention = "layer_output",
    final: Final = "none",
    out: str | Path | None = None,
    tokenizer: Any = None,
    observers: Sequence[SamplingObserver] = (),
    prompt_lookup: int = 0,
    prefill_chunk: int | None = None,
    max_batch: int = 16,
    sampling_mask_max_tokens: int = 4096,
    aborts: Aborts | None = None,
    shard_rows: int = 262_144,
    keep_rows: bool = True,
    progress: Progress | None = None,
) -> list[GenerationResult]:
    """Sample an answer to each prompt; hidden states and sampling outputs of one forward position share a row.

    The model is tried on a few tokens first, and refused where its steps on a cache are not what its plain forward gives.
    Afterwards it is as it was.

    Args:
        model: a causal language model of transformers.
        prompts: each a list of token ids, or with a tokenizer a text or a conversation (a list of messages). Where a conversation
            ends with the assistant's turn, that is left out; the template's generation prompt is put behind it.
        params: for all prompts, or one for each.
        layer_ids: strictly increasing ids under `convention`; an empty list takes no hidden states.
        final: norm states to take too: `none`, `pre`, `post` or `both`.
        out: an empty or new folder; the rows are written there too, as `CapturedDataset` reads them. Aborted requests are not.
        tokenizer: also makes the results' texts, and finds stop strings.
        observers: more of them, called behind those that `params` ask for.
        prompt_lookup: guess up to so many tokens per step from what was said before, and verify them in one forward; changes no
            distribution and no seeded token (but for rounding).
        prefill_chunk: run prompts in steps of at most so many tokens.
        max_batch: requests under way at once.
        sampling_mask_max_tokens: a larger support ends its request.
        aborts: through which requests are given up.
        shard_rows: a shard is sealed once it has so many rows.
        keep_rows: whether results hold their rows; without, memory is bounded by the requests under way.
        progress: told of each step and each request that ends; what it raises ends the generation.

    Returns:
        One result per prompt, in order.

    Raises:
        UsageError: arguments, ids or prompts that cannot be used; `StepError` where the model cannot be run so.
        DecoderNotFoundError, LayerIdError, TapError: as in an offline capture.
        ExceptionGroup: an observer's output could not be consumed.
    """
    asked = prompts_of(prompts, tokenizer)
    each = _params_of_each(params, len(asked))
    if out is not None and takes_nothing(layer_ids):
        raise UsageError("a folder of shards holds hidden states: give layer_ids, or no out.")
    options = GenerationOptions(prompt_lookup, prefill_chunk, max_batch, sampling_mask_max_tokens, shard_rows)
    capturing = cached_model(model, layer_ids, convention, final)
    run = GenerationRun(capturing, options, tokenizer, observers)
    requests, columns = run.requests(asked, each), run.columns(each)
    results: list[GenerationResult] = []
    with capturing.attached(), ExitStack() as stack:
        settings = run.settings(requests)
        sink = None
        if out is not None:
            identity = generation_identity(capturing, convention, each, settings)
            sink = stack.enter_context(shard_sink(Path(out), columns, identity, shard_rows, capturing.device))

        def ended(request: GenerationRequest) -> None:
            if sink is not None:
                sink.add(request)
            results.append(run.result(request, columns, keep_rows=keep_rows))

        progress = progress or Silent()
        progress.started(Work("generating", len(requests), unit="requests"))
        run.loop(settings, ended, aborts, progress).run(requests)
        if sink is not None:
            sink.finish()
    return sorted(results, key=lambda result: result.index)


def _params_of_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    each = [params] * count if isinstance(params, SamplingParams) else list(params)
    if len(each) != count:
        raise UsageError(f"give one SamplingParams for all prompts, or one for each of {count}; found {len(each)}.")
    return each
