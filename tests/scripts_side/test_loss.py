"""The drafter's loss by hand."""

import math

import pytest
import torch
from training.blocks import IGNORED
from training.loss import draft_loss, softmax_ids
from training.schedule import learning_rate


def log_softmax(logits: list[float], label: int) -> float:
    return logits[label] - math.log(sum(math.exp(value) for value in logits))


def test_each_place_weighs_the_decay_times_the_one_before() -> None:
    lm_head = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    states = torch.tensor([[[2.0, 0.0], [0.0, 3.0]], [[1.0, -1.0], [5.0, 5.0]]])
    labels = torch.tensor([[0, 1], [2, IGNORED]])
    losses = (-log_softmax([2, 0, 2], 0), -log_softmax([0, 3, 3], 1), -log_softmax([1, -1, 0], 2))
    loss = draft_loss(states, lm_head, labels, decay=0.5)
    assert float(loss.value) == pytest.approx((losses[0] + 0.5 * losses[1] + losses[2]) / 2.5, rel=1e-6)


def test_right_counts_the_likeliest_tokens_at_each_place() -> None:
    lm_head = torch.eye(3)
    states = torch.tensor([[[9.0, 0, 0], [0, 9.0, 0]], [[0, 0, 9.0], [0, 0, 9.0]]])
    labels = torch.tensor([[0, 2], [1, IGNORED]])
    assert draft_loss(states, lm_head, labels, decay=1.0).right.tolist() == [0.5, 0.0]


def test_a_softmax_over_some_ids_leaves_the_others_out() -> None:
    lm_head = torch.tensor([[1.0], [50.0], [2.0], [3.0]])
    loss = draft_loss(torch.tensor([[[1.0]]]), lm_head, torch.tensor([[2]]), decay=1.0, ids=torch.tensor([0, 2, 3]))
    assert float(loss.value) == pytest.approx(-log_softmax([1, 2, 3], 1), rel=1e-6)


def test_softmax_ids_are_those_that_occur_and_random_others() -> None:
    generator = torch.Generator().manual_seed(0)
    occurring = torch.tensor([3, 40, 41])
    drawn = [softmax_ids(occurring, 20, 100, generator).tolist() for _ in range(2)]
    assert all({3, 40, 41} < set(ids) and ids == sorted(set(ids)) and len(ids) <= 20 for ids in drawn)
    assert drawn[0] != drawn[1]
    assert softmax_ids(occurring, 2, 100, generator).tolist() == [3, 40, 41]
    assert softmax_ids(occurring, 0, 100, generator) is None
    assert softmax_ids(occurring, 100, 100, generator) is None


def test_the_learning_rate_rises_and_falls_to_a_tenth() -> None:
    rates = [learning_rate(1.0, step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == rates[4] == rates[5] == 1.0
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert rates[5:] == sorted(rates[5:], reverse=True)
