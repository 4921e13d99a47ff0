"""Sampling outputs that cross a pipeline of three processes equal those of one process."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support.pipeline_stages import STAGES, in_one_process, run_stage
from support.processes import run_ranks

pytestmark = pytest.mark.slow  # the processes each import the libraries


@pytest.fixture(scope="module")
def piped(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("pipeline")
    run_ranks(run_stage, STAGES, folder)
    result: list[dict[str, Any]] = json.loads((folder / "result.json").read_text())
    return result


@pytest.fixture
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_one_thread")
def test_the_first_rank_gets_what_one_process_gets(piped: list[dict[str, Any]]) -> None:
    alone = in_one_process()
    assert [request["output_ids"] for request in piped] == [request["output_ids"] for request in alone]
    assert len({token for request in piped for token in request["output_ids"]}) >= 5
    for found, expected in zip(piped, alone, strict=True):
        assert found.keys() == expected.keys()
        assert found.get("sampling_mask") == expected.get("sampling_mask")
        for name in expected.keys() - {"sampling_mask"}:
            torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(expected[name]), rtol=0, atol=1e-6)


def test_each_request_gets_the_columns_it_asked_for(piped: list[dict[str, Any]]) -> None:
    assert [sorted(request) for request in piped] == [
        ["output_ids", "sampling_logprobs", "sampling_mask", "topk_ids", "topk_logits", "topk_logsumexp"],
        ["logprobs", "output_ids", "sampling_logprobs", "sampling_mask"],
        ["output_ids"],
        ["logprobs", "output_ids", "sampling_logprobs", "sampling_mask"],
    ]


def test_rows_end_with_the_committed_tokens(piped: list[dict[str, Any]]) -> None:
    assert [len(request["output_ids"]) for request in piped] == [5, 5, 5, 5]
    assert len(piped[0]["sampling_mask"]) == 5
    assert len(piped[1]["sampling_mask"]) == len(piped[1]["logprobs"]) == 3
    assert len(piped[3]["sampling_mask"]) == 5


def test_greedy_masks_hold_the_token_alone(piped: list[dict[str, Any]]) -> None:
    assert piped[0]["sampling_mask"] == [[token] for token in piped[0]["output_ids"]]
    assert piped[0]["sampling_logprobs"] == [0.0] * 5
