"""The budget of positions, learnt on the first batches."""

import pytest
import torch

from hiddentap.capture.run.pacing.budget import TokenBudget


def test_each_size_is_tried_three_times_and_the_fastest_stays() -> None:
    budget = TokenBudget((100, 200, 400))
    speed = {100: 2.0, 200: 1.0, 400: 3.0}
    tried = []
    while budget.chosen is None:
        size = budget.next()
        tried.append(size)
        budget.observe(size, tokens=size, positions=size, seconds=size * speed[size])
    assert (sorted(tried), budget.chosen, budget.next()) == ([100] * 3 + [200] * 3 + [400] * 3, 200, 200)


@pytest.mark.parametrize("tries", [(1.0, 50.0, 1.0), (50.0, 1.0, 50.0)], ids=["one of three", "two of three"])
def test_slow_batches_do_not_decide(tries: tuple[float, ...]) -> None:
    budget = TokenBudget((100, 200))
    for seconds in tries:
        budget.observe(100, 100, 100, seconds)
    for _ in range(3):
        budget.observe(200, 200, 200, 4.0)
    assert budget.chosen == 100


def test_a_batch_that_could_not_use_its_budget_says_nothing() -> None:
    budget = TokenBudget((100, 200))
    for _ in range(9):
        budget.observe(200, 20, 20, 0.0)
    assert budget.next() == 100
    assert budget.chosen is None


def test_a_size_that_no_batch_can_use_is_given_up() -> None:
    budget = TokenBudget((100, 200))
    for _ in range(20):
        size = budget.next()
        budget.observe(size, 90, 90, 1.0)
    assert budget.chosen == 100


def test_a_fixed_budget_is_chosen_from_the_start() -> None:
    assert TokenBudget.fixed(64).next() == 64
    assert TokenBudget.probing(torch.device("cpu")).chosen is None


def test_a_batch_that_does_not_fit_takes_the_sizes_from_there_on_away() -> None:
    budget = TokenBudget((100, 200, 400))
    budget.limit(390)
    assert budget.sizes == (100, 200)
    budget.limit(200)
    assert budget.sizes == (100,)
    budget.limit(90)
    assert (budget.sizes, budget.next()) == ((45,), 45)
