"""vLLM as the engine of a regeneration."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import GenerationConfig

from ...models.errors import RunError, UsageError
from ...models.loading import describe_model
from ..data import RecordEncoder
from ..progress import Done, Progress
from ..run.engines.vllm.library import Vllm, opened_vllm
from ..run.engines.vllm.options import engine_identity
from ..run.engines.vllm.refusals import require_own_options, require_vllm_installed
from ..sampling import FinishKind, Prompt, SamplingParams
from ..sampling.generation.end_marks import EndMarks
from ..sampling.generation.prompts import prompt_fault
from ..sampling.generation.run import GenerationOptions
from ..sampling.generation_settings import GenerationSettings
from .engine import Answer, AnswerEngineKind

# vLLM fills its own batches; a piece is what a killed run loses, and long enough that its tail costs little.
_PIECE_ROWS = 2048
# What the command sets itself; see `GenerationSettings.model`.
_TAKEN = ("dtype", "model", "revision", "skip_tokenizer_init", "tokenizer", "trust_remote_code")


class VllmAnswers:
    """Answers by `vllm.LLM.generate`, from token ids to token ids."""

    def __init__(self, vllm: Vllm, end_marks: EndMarks, vocab_rows: int, progress: Progress) -> None:
        self._vllm, self._vocab_rows, self._progress = vllm, vocab_rows, progress
        self.end_marks = end_marks
        self.max_positions = int(vllm.llm.llm_engine.model_config.max_model_len)

    def fault(self, prompt: Prompt, params: SamplingParams) -> str | None:  # noqa: ARG002 - they cannot make one
        return prompt_fault(prompt, self._vocab_rows, self.max_positions)

    def answers(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Answer]:
        outputs = self._vllm.generate(
            [prompt.token_ids for prompt in prompts], [self._vllm_params(one) for one in params]
        )
        answers = [_answer(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]
        self._progress.advanced(Done(len(answers), tokens=sum(len(answer.token_ids) for answer in answers)))
        return answers

    def _vllm_params(self, params: SamplingParams) -> Any:
        """Return `params` in vLLM's words.

        Its own end-of-sequence token is ignored and ours are named, so that an answer ends where one of `--engine hf` does.
        """
        ends = () if params.ignore_eos else self.end_marks.token_ids
        return self._vllm.params(
            temperature=0.0 if params.is_greedy else params.temperature,
            top_p=params.top_p,
            top_k=params.top_k or -1,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            seed=params.seed,
            max_tokens=params.max_new_tokens,
            stop=list(params.stop),
            stop_token_ids=sorted({*ends, *params.stop_token_ids}),
            ignore_eos=True,
            detokenize=bool(params.stop),
        )


@contextmanager
def opened(settings: GenerationSettings, encoder: RecordEncoder, progress: Progress) -> Iterator[VllmAnswers]:
    """Open the engine; vLLM's processes and memory are held inside the block only.

    Raises:
        RunError: vLLM cannot open the model.
    """
    described = describe_model(settings.model)
    has = encoder.has_tokenizer
    if (described.folder / "generation_config.json").is_file():
        described.model.generation_config = GenerationConfig.from_pretrained(described.folder)
    marks = EndMarks.of(described.model, encoder.tokenizer if has else None, encoder.template if has else None)
    vocab_rows = _vocab_rows(described.model)
    with opened_vllm(_arguments(settings), "to generate with it") as vllm:
        yield VllmAnswers(vllm, marks, vocab_rows, progress)


def _vocab_rows(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def _arguments(settings: GenerationSettings) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`."""
    source = settings.model
    return {
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **settings.engine_options,
        "model": source.name,
        "revision": source.revision,
        "trust_remote_code": source.trust_remote_code,
        "skip_tokenizer_init": not settings.params.stop,
        "dtype": source.dtype,
    }


def _answer(prompt: Prompt, output: Any) -> Answer:
    """Return vLLM's answer in our words; raise RunError where it is none."""
    given = list(output.prompt_token_ids or ())
    (made,) = output.outputs
    tokens = tuple(int(token) for token in made.token_ids)
    kinds: dict[str, FinishKind] = {
        "stop": "stop_string" if isinstance(made.stop_reason, str) else "stop_token",
        "length": "length",
    }
    if given != list(prompt.token_ids) or not tokens or made.finish_reason not in kinds:
        raise RunError(
            f"expected vLLM to answer prompt {prompt.sample_id} of {len(prompt.token_ids)} tokens; found "
            f"{len(tokens)} new tokens behind {len(given)} and the finish reason {made.finish_reason!r}."
        )
    return Answer(tokens, kinds[made.finish_reason])


def _refuse(settings: GenerationSettings) -> None:
    model = settings.model
    if settings.options != GenerationOptions():
        raise UsageError(
            "--max-batch, --prefill-chunk, --prompt-lookup and --sampling-mask-max-tokens describe the steps of --engine hf; "
            "vLLM makes its own batches (--engine-option max_num_seqs=N). Leave them out."
        )
    for given, option in ((model.device != "auto", "--device"), (model.device_map is not None, "--device-map")):
        if given:
            raise UsageError(
                f"{option}: vLLM takes the devices that it was built for. Leave it out, or take --engine hf."
            )
    require_own_options(settings.engine_options, _TAKEN)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("torchrun starts a run several times, and vLLM starts its own processes.")
    require_vllm_installed()


def _identity(settings: GenerationSettings) -> Mapping[str, Any]:
    return {"engine_options": engine_identity(settings.engine_options)}


def _piece_rows(_settings: GenerationSettings) -> int:
    return _PIECE_ROWS


KIND = AnswerEngineKind(_refuse, _identity, _piece_rows, opened)
