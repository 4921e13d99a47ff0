"""A real model: SmolLM2-135M-Instruct beside transformers' own generate(), and rollouts that a trainer replays."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hiddentap.capture.sampling import SamplingParams, generate_with_capture, masked_log_softmax
from support.generation import PlainForward, greedy, row_error

pytestmark = [pytest.mark.smollm2, pytest.mark.slow]

DATA = Path(__file__).parent.parent / "data" / "conversations.jsonl"
LAYER_IDS = [1, 14, 26]
COUNT = 10
GREEDY = SamplingParams(temperature=0, max_new_tokens=COUNT, ignore_eos=True, top_logits=8)


@pytest.fixture(scope="module")
def tokenizer(smollm2_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_folder)


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[list[int]]:
    """Ten prompts of ten lengths, cut from real conversations."""
    rows = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()[:10]]
    texts = [json.dumps(row.get("messages") or row["conversations"], ensure_ascii=False) for row in rows]
    return [tokenizer(text)["input_ids"][: 6 + 5 * place] for place, text in enumerate(texts)]


@pytest.fixture(scope="module")
def float32(smollm2_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def expected(float32: Any, prompts: list[list[int]]) -> list[list[int]]:
    return [greedy(float32, prompt, COUNT) for prompt in prompts]


def tokens(model: Any, prompts: list[list[int]], layer_ids: list[int] = LAYER_IDS, **options: Any) -> list[list[int]]:
    return [
        list(one.token_ids) for one in generate_with_capture(model, prompts, GREEDY, layer_ids=layer_ids, **options)
    ]


@pytest.mark.parametrize("layer_ids", [LAYER_IDS, []], ids=["captured", "not captured"])
@pytest.mark.parametrize("options", [{}, {"prompt_lookup": 4}], ids=str)
def test_ten_prompts_of_ten_lengths_give_the_tokens_of_generate(
    float32: Any, prompts: list[list[int]], expected: list[list[int]], layer_ids: list[int], options: dict[str, Any]
) -> None:
    assert len({len(prompt) for prompt in prompts}) == 10
    assert min(len(set(output)) for output in expected) >= 5
    assert tokens(float32, prompts, layer_ids, **options) == expected


@pytest.mark.parametrize("options", [{"layer_ids": []}, {"prompt_lookup": 4}], ids=str)
def test_one_prompt_at_a_time_gives_the_tokens_of_generate(
    float32: Any, prompts: list[list[int]], expected: list[list[int]], options: dict[str, Any]
) -> None:
    assert tokens(float32, prompts, max_batch=1, **options) == expected


def bf16_steps(first: float, second: float) -> float:
    return abs(first - second) / 2.0 ** (math.floor(math.log2(max(abs(first), abs(second)))) - 7)


@pytest.fixture(scope="module")
def bfloat16(smollm2_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def expected_bfloat16(bfloat16: Any, prompts: list[list[int]]) -> list[list[int]]:
    return [greedy(bfloat16, prompt, COUNT) for prompt in prompts]


@pytest.mark.parametrize("options", [{}, {"prompt_lookup": 4}], ids=str)
def test_in_bfloat16_tokens_first_differ_where_the_likeliest_two_are_within_two_steps(
    bfloat16: Any, prompts: list[list[int]], expected_bfloat16: list[list[int]], options: dict[str, Any]
) -> None:
    results = generate_with_capture(bfloat16, prompts, GREEDY, layer_ids=LAYER_IDS, **options)
    for result, expected in zip(results, expected_bfloat16, strict=True):
        at = next((i for i in range(COUNT) if result.token_ids[i] != expected[i]), None)
        if at is None:
            continue
        row = len(result.prompt_ids) - 1 + at
        logits = dict(zip(result.rows["topk_ids"][row].tolist(), result.rows["topk_logits"][row].tolist(), strict=True))
        assert bf16_steps(logits[result.token_ids[at]], logits[expected[at]]) <= 2, (result.index, at)


def test_rollouts_are_replayed_from_their_rows_by_a_trainer(
    float32: Any, prompts: list[list[int]], tokenizer: Any
) -> None:
    params = [
        SamplingParams(
            seed=place, temperature=0.8, top_p=0.95, top_k=50, max_new_tokens=16, return_sampling_mask=True,
            return_logprob=True,
        )
        for place in range(5)
    ]  # fmt: skip
    results = generate_with_capture(
        float32, prompts[:5], params, layer_ids=LAYER_IDS, tokenizer=tokenizer, prompt_lookup=2
    )
    assert len({token for result in results for token in result.token_ids}) > 30
    for result in results:
        plain = PlainForward(float32, result.input_ids.tolist())
        assert row_error(result.aux_hidden_states, plain.layers(LAYER_IDS)) < 1e-5
        written = result.output_ids >= 0
        chosen = result.output_ids[written].long()[:, None]
        replayed = masked_log_softmax(plain.logits / 0.8, result.sampling_mask)[written].gather(-1, chosen).squeeze(-1)
        recorded = result.rows["sampling_logprobs"][written]
        assert (replayed - recorded).abs().max() < 1e-4
        whole = plain.logits.log_softmax(-1)[written].gather(-1, chosen).squeeze(-1)
        assert (whole - result.rows["logprobs"][written]).abs().max() < 1e-4
        # The support is cut: normalising over the whole vocabulary would give a trainer other numbers.
        assert (replayed - whole).abs().max() > 0.01
        assert result.text == tokenizer.decode(list(result.token_ids), skip_special_tokens=True)
