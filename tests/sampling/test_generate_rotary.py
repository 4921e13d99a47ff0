"""Generation of models whose rotary frequencies change for a whole forward at some length."""

from typing import Any

import pytest
import torch

from hiddentap.capture.sampling import SamplingParams, generate_with_capture
from hiddentap.models.errors import UsageError
from support.architectures import build, token_ids
from support.generation import CountedCalls, PlainForward, row_error

ROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def longrope(family: str = "phi3") -> Any:
    own = {} if family == "llama" else {"original_max_position_embeddings": 64}
    return build(family, rope_parameters=dict(ROPE), max_position_embeddings=256, **own)


def prompts(*lengths: int) -> list[list[int]]:
    return [token_ids(1, length, seed=length).tolist()[0] for length in lengths]


def params(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True)


def test_a_request_that_would_cross_the_length_is_refused_with_the_room_that_it_has() -> None:
    text = r"prompt 0: 60 prompt tokens and up to 10 new ones cross 64 positions.* at most 5 new tokens"
    with pytest.raises(UsageError, match=text):
        generate_with_capture(longrope(), prompts(60, 40), params(10), layer_ids=[1])
    [result] = generate_with_capture(longrope(), prompts(60), params(5), layer_ids=[1])
    assert len(result.token_ids) == 5


def test_guesses_count_as_positions_for_they_are_in_a_forward() -> None:
    with pytest.raises(UsageError, match="at most 2 new tokens"):
        generate_with_capture(longrope(), prompts(60), params(5), layer_ids=[1], prompt_lookup=3)


def test_a_prompt_past_the_length_is_not_run_in_chunks() -> None:
    with pytest.raises(UsageError, match=r"70 prompt tokens are more than 64.* cannot be run in chunks"):
        generate_with_capture(longrope(), prompts(70), params(2), layer_ids=[1], prefill_chunk=16)


@pytest.mark.parametrize("family", ["phi3", "llama"])
def test_requests_on_both_sides_run_beside_each_other_and_never_in_one_forward(family: str) -> None:
    model = longrope(family)
    with CountedCalls(model) as calls:
        results = generate_with_capture(model, prompts(50, 40, 66, 70), params(8), layer_ids=[0, 2])
    assert max(B for B, S in calls.shapes if S == 1) == 2
    for result in results:
        plain = PlainForward(model, result.rows["input_ids"].tolist())
        assert row_error(result.rows["aux_hidden_states"], plain.layers([0, 2])) < 1e-4
        with torch.no_grad():
            logits = model(result.rows["input_ids"][None].long(), use_cache=False).logits[0]
        P = len(result.prompt_ids)
        assert logits[P - 1 :].argmax(-1).tolist() == list(result.token_ids)
