"""A request handed from a prefill process to a decode process, and what is refused on the way."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hiddentap.capture.sampling import generate_with_capture
from support.cached_steps import plain
from support.generation import LAYER_IDS, PROMPTS, lively, row_error
from support.handoff_sides import FAMILIES, GOOD, IDS, PARAMS, both
from support.processes import run_ranks

pytestmark = pytest.mark.slow  # the processes each import the libraries


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("handoff")
    run_ranks(both, 2, folder)
    return folder


@pytest.fixture
def handed(folder: Path) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = json.loads((folder / "results.json").read_text())
    return results


@pytest.mark.parametrize("name", GOOD)
def test_the_decode_side_goes_on_where_the_prefill_side_stopped(handed: dict[str, dict[str, Any]], name: str) -> None:
    ids = torch.cat([IDS, torch.tensor([[11], [12]])], dim=1)
    expected, found = plain(name, ids), torch.tensor(handed[name]["logits"])
    assert ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < 1e-5


@pytest.mark.parametrize("name", GOOD)
def test_the_first_token_arrives_with_all_that_was_recorded(handed: dict[str, dict[str, Any]], name: str) -> None:
    assert {key: value for key, value in handed[name].items() if key != "logits"} == {
        "tokens": [11, 12],
        "logprobs": [-0.5, None],
        "top_logprobs": [[-0.5, -1.5], []],
        "top_ids": [[11, 12], []],
        "masks": [[11, 30, 12], None],
        "sampling_logprobs": [-0.25, None],
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_a_generation_in_two_processes_gives_the_tokens_masks_and_rows_of_one(folder: Path, family: str) -> None:
    halves = [json.loads((folder / f"generation-{rank}.json").read_text())[family] for rank in (0, 1)]
    whole = generate_with_capture(lively(family), PROMPTS[: len(PARAMS)], PARAMS, layer_ids=LAYER_IDS)
    assert len({token for one in whole for token in one.token_ids}) >= 8
    for first, second, expected in zip(*halves, whole, strict=True):
        assert second["first_token"] == first["output_ids"][0]
        assert first["output_ids"] + second["output_ids"] == list(expected.token_ids)
        states = torch.tensor(first["aux_hidden_states"] + second["aux_hidden_states"])
        assert row_error(states, expected.aux_hidden_states) < 1e-5
        written = slice(len(expected.prompt_ids) - 1, None)
        masks = expected.sampling_mask.to_lists()[written]
        asked = PARAMS[expected.index].return_sampling_mask
        assert masks == (first["sampling_mask"] + second["sampling_mask"] if asked else [None] * len(masks))
        assert second["first_mask"] == masks[0]
        for name in {"sampling_logprobs", "logprobs"} & first.keys():
            found = torch.tensor(first[name] + second[name])
            torch.testing.assert_close(found, expected.rows[name][written], rtol=0, atol=1e-5)


@pytest.fixture
def errors(folder: Path) -> list[list[str]]:
    return [json.loads((folder / f"errors-{rank}.json").read_text()) for rank in (0, 1)]


def test_what_the_prefill_side_cannot_send_is_an_error_on_both_sides(errors: list[list[str]]) -> None:
    no_token = "RunError: slot 1 holds no first token: the prefill side did not fill it, or failed to."
    assert errors[0][0] == no_token
    assert errors[1][0] == no_token.replace(
        "RunError: ", "RunError: the prefill process could not hand the request over: "
    )
    assert errors[0][1].startswith("RunError: the cache is a support.handoff_sides.GrownCache;")
    assert "could not hand the request over: the cache is a support.handoff_sides.GrownCache;" in errors[1][2]


def test_a_failed_hand_off_leaves_no_older_token_in_the_slot(errors: list[list[str]]) -> None:
    assert errors[1][1].startswith("RunError: slot 0 holds no first token")


def test_a_cache_of_another_model_is_refused(errors: list[list[str]]) -> None:
    assert errors[1][3].startswith("RunError: the cache sent is of another model: expected layers")


def test_what_does_not_fit_into_the_slot_of_the_decode_side_is_refused(errors: list[list[str]]) -> None:
    variable = "SGLANG_DISAGGREGATION_SAMPLING_MASK_MAX_TOKENS"
    assert errors[1][4:7] == [
        f"RunError: Sampling mask length 3 exceeds disaggregation metadata capacity 2. Increase {variable}.",
        f"RunError: return_sampling_mask with disaggregation requires {variable} > 0.",
        "RunError: top_logprobs_num 2 exceeds disaggregation metadata capacity 1. "
        "Lower top_logprobs_num or increase the metadata buffer.",
    ]


def test_after_every_error_the_next_request_arrives_whole(errors: list[list[str]]) -> None:
    assert errors[1][7] == "[11, 30, 12]"


def test_a_request_that_wants_no_mask_needs_no_buffers_for_masks_on_the_decode_side(errors: list[list[str]]) -> None:
    assert errors[1][8] == "no error"
