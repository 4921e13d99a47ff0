"""Why a request ends, beside transformers' own generate() under every end mark that somebody names."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from hiddentap import SamplingParams, generate_with_capture
from support.generation import greedy, lively
from support.templates import CHATML, byte_tokenizer

COUNT = 10
PROMPTS = [[5 + i, 9, 33 + 2 * i, 7][: 2 + i % 3] for i in range(8)]


def of_generate(model: Any, prompt: list[int], ends: list[int]) -> list[int]:
    """The tokens that transformers' generate() gives with these end tokens."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=COUNT,
            eos_token_id=ends,
            pad_token_id=0,
        )
    return made[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def seen() -> list[list[int]]:
    return [greedy(lively("llama"), prompt, COUNT) for prompt in PROMPTS]


def marks(seen: list[list[int]]) -> list[int]:
    """Two tokens at which requests end: one early, one as the last token that is allowed; some requests have neither."""
    return next(
        [early, tokens[-1]]
        for early in (one[3] for one in seen)
        for tokens in seen
        if early not in tokens
        and tokens[-1] not in tokens[:-1]
        and any(early not in one and tokens[-1] not in one for one in seen)
    )


@pytest.mark.parametrize("named_by", ["generation config", "config", "params"])
def test_tokens_and_reasons_are_those_of_generate(seen: list[list[int]], named_by: str) -> None:
    model, ends = deepcopy(lively("llama")), marks(seen)
    params = SamplingParams(temperature=0, max_new_tokens=COUNT)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    if named_by == "generation config":
        model.generation_config.eos_token_id = ends
    elif named_by == "config":
        model.config.eos_token_id = ends
    else:
        params = SamplingParams(temperature=0, max_new_tokens=COUNT, stop_token_ids=ends)
    expected = [of_generate(model, prompt, ends) for prompt in PROMPTS]
    results = generate_with_capture(model, PROMPTS, params, layer_ids=[1])
    assert [list(result.token_ids) for result in results] == expected
    reasons = ["stop_token" if tokens[-1] in ends else "length" for tokens in expected]
    assert [result.finish_reason for result in results] == reasons
    assert set(reasons) == {"stop_token", "length"}
    # An end mark as the last token that is allowed ended the request, and not the length.
    assert any(len(tokens) == COUNT for tokens, reason in zip(expected, reasons, strict=True) if reason == "stop_token")


def test_the_marks_of_tokenizer_and_template_count_beside_those_of_the_config(
    seen: list[list[int]], tmp_path: Path
) -> None:
    special = tuple(f"<|t{token}|>" for token in range(120))
    early, late = marks(seen)
    template = CHATML.replace("<|im_end|>", special[early]).replace("<|im_start|>", special[0])
    tokenizer = AutoTokenizer.from_pretrained(byte_tokenizer(tmp_path, template, special))
    tokenizer.eos_token = special[late]
    assert tokenizer.convert_tokens_to_ids(special[late]) == late
    model = deepcopy(lively("llama"))
    model.generation_config.eos_token_id = other = seen[2][5]
    ends = [early, late, other]
    expected = [of_generate(model, prompt, ends) for prompt in PROMPTS]
    results = generate_with_capture(
        model, PROMPTS, SamplingParams(temperature=0, max_new_tokens=COUNT), layer_ids=[1], tokenizer=tokenizer
    )
    assert [list(result.token_ids) for result in results] == expected
    assert {result.token_ids[-1] for result in results if result.finish_reason == "stop_token"} >= {early, late}
