"""Guesses from what was said before."""

import pytest

from hiddentap.capture.sampling.generation.prompt_lookup import PromptLookup
from hiddentap.capture.sampling.generation.request import SampledRun


@pytest.mark.parametrize(
    ("ids", "count", "guess"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], 2, [4, 5]),
        ([1, 2, 3, 4, 5, 1, 2, 3], 9, [4, 5, 1, 2, 3]),
        ([1, 2, 3, 4], 3, []),
        ([7], 3, []),
        ([7, 7], 3, [7]),
        ([7, 7, 7], 3, [7]),
        ([9, 3, 5, 8, 3, 6, 3], 1, [6]),
        ([1, 3, 5, 2, 3, 6, 1, 3], 1, [5]),
        ([1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 3], 1, [9]),
        ([1, 2, 1, 2], 0, []),
        ([1, 2, 1, 2], -1, []),
    ],
    ids=[
        "what followed", "no more than there is", "never seen", "one token", "itself", "a run", "the latest place",
        "a longer match first", "the latest of two", "none asked", "no room",
    ],
)  # fmt: skip
def test_the_guess_is_what_followed_the_longest_match_last(ids: list[int], count: int, guess: list[int]) -> None:
    assert PromptLookup(ids).draft(count) == guess


def test_tokens_that_come_later_count_too() -> None:
    lookup = PromptLookup([1, 2])
    assert lookup.draft(2) == []
    lookup.extend([3, 1, 2])
    assert lookup.draft(2) == [3, 1]


@pytest.mark.parametrize(
    ("tokens", "draft", "accepted"),
    [([5], [], 1), ([5, 6, 7], [5, 6], 3), ([5, 6, 7], [5, 8], 2), ([5, 6, 7], [4, 6], 1), ([4, 6], [4], 2)],
)
def test_a_run_is_accepted_up_to_its_first_wrong_guess_and_the_token_in_its_place(
    tokens: list[int], draft: list[int], accepted: int
) -> None:
    assert SampledRun(tokens, draft).accepted == accepted
