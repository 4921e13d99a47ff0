"""A trainer replays the distribution that a token was sampled from."""

import math

import pytest
import torch

from hiddentap.capture.outputs import RaggedRows
from hiddentap.capture.sampling import masked_log_softmax


def ragged(lists: list[list[int] | None]) -> RaggedRows:
    lengths = [-1 if one is None else len(one) for one in lists]
    values = [token for one in lists for token in one or []]
    return RaggedRows(torch.tensor(lengths, dtype=torch.int32), torch.tensor(values, dtype=torch.int32))


def test_a_support_is_normalised_alone() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    result = masked_log_softmax(logits, torch.tensor([[True, False, True]]))
    total = math.log(math.exp(1) + math.exp(3))
    assert result[0].tolist() == [pytest.approx(1 - total, abs=1e-6), -math.inf, pytest.approx(3 - total, abs=1e-6)]


def test_lists_and_a_bool_mask_of_the_same_support_give_the_same_numbers() -> None:
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[True, True, False, False, True], [False, False, False, True, False], [True] * 5])
    by_lists = masked_log_softmax(logits, ragged([[4, 0, 1], [3], None]))
    assert torch.equal(by_lists, masked_log_softmax(logits, mask))
    assert by_lists[1, 3].item() == 0.0


def test_a_row_without_a_list_is_normalised_over_everything_and_an_empty_list_over_nothing() -> None:
    logits = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    full, empty = masked_log_softmax(logits, ragged([None, []]))
    torch.testing.assert_close(full, torch.full((2,), -math.log(2)))
    assert empty.tolist() == [-math.inf, -math.inf]


def test_the_gradient_is_that_of_the_support_alone_and_zero_outside() -> None:
    logits = torch.tensor([[0.3, -1.0, 2.0, 0.7]], requires_grad=True)
    masked_log_softmax(logits, ragged([[2, 0, 3]]))[0, 2].backward()
    inside = torch.tensor([0.3, 2.0, 0.7], requires_grad=True)
    torch.log_softmax(inside, dim=-1)[1].backward()
    assert logits.grad is not None
    assert inside.grad is not None
    torch.testing.assert_close(logits.grad[0, [0, 2, 3]], inside.grad)
    assert logits.grad[0, 1].item() == 0.0


def test_an_empty_row_gives_no_nan_to_the_gradient_of_the_others() -> None:
    logits = torch.randn(2, 4, requires_grad=True)
    with torch.autograd.detect_anomaly(check_nan=True):
        masked_log_softmax(logits, ragged([[], [1, 2]]))[1, 1].backward()
    assert logits.grad is not None
    assert logits.grad[0].tolist() == [0.0] * 4
    assert torch.isfinite(logits.grad).all()


def test_gradients_agree_with_finite_differences() -> None:
    logits = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, False, True, True, False, False], [False, True, True, False, True, True]])
    assert torch.autograd.gradcheck(lambda x: masked_log_softmax(x, mask)[mask], (logits,))


def test_half_precision_is_computed_and_returned_in_float32() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16)
    result = masked_log_softmax(logits, torch.tensor([[True, True, False]]))
    assert result.dtype == torch.float32
    assert result[0, 1].item() == pytest.approx(-math.log1p(math.exp(-1)), abs=1e-6)


def test_a_mask_may_have_any_leading_shape() -> None:
    logits = torch.zeros(2, 3, 4)
    mask = torch.zeros(2, 3, 4, dtype=torch.bool)
    mask[..., :2] = True
    torch.testing.assert_close(masked_log_softmax(logits, mask)[1, 2, 0], torch.tensor(-math.log(2)))


@pytest.mark.parametrize(
    ("logits", "mask", "text"),
    [
        (torch.zeros(1, 3), torch.ones(1, 3), r"a mask is bool.*found torch.float32"),
        (torch.zeros(1, 3), torch.ones(1, 4, dtype=torch.bool), r"shaped like the logits \(1, 3\).*\(1, 4\)"),
        (torch.zeros(2, 3), ragged([[1]]), r"1 lists of token ids need logits of shape \(1, V\); found \(2, 3\)"),
        (torch.zeros(1, 3), ragged([[3]]), r"must be in 0..2; found 3..3"),
        (torch.zeros(1, 3), ragged([[-2, 1]]), r"must be in 0..2; found -2..1"),
    ],
)
def test_what_does_not_fit_is_refused(logits: torch.Tensor, mask: torch.Tensor, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        masked_log_softmax(logits, mask)
