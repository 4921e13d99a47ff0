"""`generate_with_capture`: sample from a model, and keep what every forward position showed."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from ...hooks import Final
from ...models.errors import UsageError
from ...models.layer_choice import LayerChoice
from ...models.layer_ids import Algorithm, Convention
from ..progress import Progress, Silent, Work
from ..settings import FolderSettings
from .generation.cached_model import cached_model
from .generation.finish import Aborts
from .generation.prompts import PromptLike, prompts_of
from .generation.request import GenerationRequest
from .generation.result import GenerationResult
from .generation.run import GenerationOptions, GenerationRun
from .run_identity import generation_identity
from .sampler.observers import SamplingObserver
from .sampler.params import SamplingParams
from .shard_sink import shard_sink


def generate_with_capture(
    model: nn.Module,
    prompts: Sequence[PromptLike],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    layer_ids: Sequence[int] | None = None,
    convention: Convention | None = None,
    ids_of: str | None = None,
    draft_config: str | Path | None = None,
    algorithm: Algorithm | None = None,
    adapter: str | None = None,
    final: Final | None = None,
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

    Tries the model on a few tokens first and refuses one whose steps on a cache differ from its plain forward. Restores the
    model afterwards.

    Args:
        model: a causal language model of transformers.
        prompts: each a list of token ids, or with a tokenizer a text or a conversation (a list of messages). A last assistant
            turn is left out; the template's generation prompt is appended.
        params: for all prompts, or one for each.
        layer_ids: strictly increasing ids under `convention` (None: ``layer_output``); an empty list takes no hidden states.
        ids_of: whose ids `layer_ids` are, or those of `draft_config`: vllm, specforge, ...; see `models.id_systems`.
        draft_config: a draft model's config.json to take the ids from, instead of `layer_ids`.
        algorithm: take the default layers of eagle3, dflash or dspark instead.
        adapter: how the residual stream is read where it is not plain; see `models.adapters`.
        final: norm states to take too: `none`, `pre`, `post` or `both`. None is `pre`, as in a capture, where there are
            layers to take, else `none`.
        out: an empty or new folder; the rows are written there too, as `CapturedDataset` reads them. Aborted requests are not.
        tokenizer: decodes the results' texts, and finds stop strings.
        observers: called after those that `params` ask for.
        prompt_lookup: draft up to so many tokens per step from earlier text, and verify them in one forward; changes no
            distribution and no seeded token (but for rounding).
        prefill_chunk: run prompts in steps of at most so many tokens.
        max_batch: most requests that run at once.
        sampling_mask_max_tokens: a larger support ends its request.
        aborts: aborts requests from outside.
        shard_rows: rows at which a shard is sealed.
        keep_rows: whether results hold their rows; without, the requests that run at once bound the memory.
        progress: receives each step and each request that ends; an exception that it raises ends the generation.

    Returns:
        One result per prompt, in order.

    Raises:
        UsageError: arguments, ids or prompts that cannot be used; `StepError` where the model cannot be run so.
        DecoderNotFoundError, AdapterError, LayerIdError, DraftConfigError, TapError: as in an offline capture.
        ExceptionGroup: an observer's output could not be consumed.

    Example:
        >>> params = SamplingParams(temperature=0.8, seed=1, max_new_tokens=4, ignore_eos=True, return_logprob=True)
        >>> [result] = generate_with_capture(model, [[5, 6, 7]], params, layer_ids=[1, 2])
        >>> result.aux_hidden_states.shape, result.rows["logprobs"].shape  # 3 + 4 - 1 rows
        (torch.Size([6, 2, 32]), torch.Size([6]))
    """
    layers = LayerChoice(layer_ids, convention, ids_of, None if draft_config is None else Path(draft_config), algorithm)
    takes_states = layer_ids is None or len(layer_ids) > 0
    asked = prompts_of(prompts, tokenizer)
    each = _params_of_each(params, len(asked))
    if out is not None and not takes_states:
        raise UsageError("a folder of shards holds hidden states: give layer_ids, or no out.")
    options = GenerationOptions(prompt_lookup, prefill_chunk, max_batch, sampling_mask_max_tokens)
    folder = FolderSettings(shard_rows=shard_rows)
    final = final or ("pre" if takes_states else "none")
    capturing = cached_model(model, layers if takes_states else None, final, adapter=adapter)
    run = GenerationRun(capturing, options, tokenizer, observers)
    requests, columns = run.requests(asked, each), run.columns(each)
    results: list[GenerationResult] = []
    with capturing.attached(), ExitStack() as stack:
        settings = run.settings(len(requests))
        sink = None
        if out is not None:
            identity = generation_identity(capturing.tapped, layers, each, settings, run.end_marks)
            sink = stack.enter_context(shard_sink(Path(out), columns, identity, folder.shard_rows, capturing.device))

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
