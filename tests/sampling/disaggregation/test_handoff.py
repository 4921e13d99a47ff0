"""The hand-off of the first token from prefill to decode."""

import math
from dataclasses import replace

import pytest
import torch

from hiddentap.capture.sampling import FirstToken, MetadataBuffers

VARIABLE = "SGLANG_DISAGGREGATION_SAMPLING_MASK_MAX_TOKENS"
DISABLED = f"return_sampling_mask with disaggregation requires {VARIABLE} > 0."
MASKED = FirstToken(7, wants_sampling_mask=True, sampling_mask=[7, 3, 9], sampling_logprob=-0.25)


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def test_a_slot_gives_back_what_was_put_into_it() -> None:
    buffers = MetadataBuffers(slots=3, max_top_logprobs=4, max_sampling_mask_tokens=5)
    first = FirstToken(
        token_id=7,
        logprob=-0.5,
        top_logprobs=[-0.5, -1.25],
        top_ids=[7, 2],
        wants_sampling_mask=True,
        sampling_mask=[7, 3, 9],
        sampling_logprob=-0.25,
    )
    buffers.set_buf(1, first)
    assert buffers.get_buf(1, wants_sampling_mask=True) == first


def test_slots_do_not_touch_each_other() -> None:
    buffers = MetadataBuffers(slots=2, max_sampling_mask_tokens=4)
    buffers.set_buf(0, MASKED)
    buffers.set_buf(1, FirstToken(8, wants_sampling_mask=True, sampling_mask=[8], sampling_logprob=0.0))
    assert buffers.get_buf(0, wants_sampling_mask=True).sampling_mask == [7, 3, 9]
    assert buffers.get_buf(1, wants_sampling_mask=True).sampling_mask == [8]


def test_tensors_have_the_documented_dtypes_and_shapes() -> None:
    buffers = MetadataBuffers(slots=3, max_top_logprobs=4, max_sampling_mask_tokens=5)
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in buffers.tensors().items()} == {
        "token_ids": (torch.int32, (3,)),
        "logprobs": (torch.float32, (3,)),
        "top_lengths": (torch.int32, (3,)),
        "top_logprobs": (torch.float32, (3, 4)),
        "top_ids": (torch.int32, (3, 4)),
        "mask_lengths": (torch.int32, (3,)),
        "mask_ids": (torch.int32, (3, 5)),
        "sampling_logprobs": (torch.float32, (3,)),
    }


@pytest.mark.parametrize("value", [None, "0", "", " 0 "])
def test_without_a_capacity_no_mask_buffers_are_allocated(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    buffers = MetadataBuffers(slots=1)
    assert buffers.max_sampling_mask_tokens == 0
    assert [name for name in buffers.tensors() if "mask" in name or "sampling" in name] == []


def test_the_capacity_comes_from_the_environment_unless_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "12")
    assert MetadataBuffers(slots=1).max_sampling_mask_tokens == 12
    assert MetadataBuffers(slots=1).tensors()["mask_ids"].shape == (1, 12)
    assert MetadataBuffers(slots=1, max_sampling_mask_tokens=0).max_sampling_mask_tokens == 0
    assert MetadataBuffers(slots=1, max_sampling_mask_tokens=3).max_sampling_mask_tokens == 3


@pytest.mark.parametrize("value", ["-1", "many", "1.5"])
def test_a_variable_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ValueError, match=f"{VARIABLE} must be an integer >= 0; found '{value}'"):
        MetadataBuffers(slots=1)


def test_a_mask_without_buffers_for_masks_is_refused_on_both_sides() -> None:
    buffers = MetadataBuffers(slots=1)
    with pytest.raises(RuntimeError) as caught:
        buffers.set_buf(0, MASKED)
    assert str(caught.value) == DISABLED
    buffers.set_buf(0, FirstToken(7))
    with pytest.raises(RuntimeError) as caught:
        buffers.get_buf(0, wants_sampling_mask=True)
    assert str(caught.value) == DISABLED


def test_a_request_that_wants_a_mask_and_has_none_is_refused_too_without_buffers() -> None:
    with pytest.raises(RuntimeError) as caught:
        MetadataBuffers(slots=1).set_buf(0, FirstToken(7, wants_sampling_mask=True))
    assert str(caught.value) == DISABLED


def test_a_mask_longer_than_its_room_is_refused() -> None:
    with pytest.raises(RuntimeError) as caught:
        MetadataBuffers(slots=1, max_sampling_mask_tokens=2).set_buf(0, MASKED)
    assert str(caught.value) == (
        f"Sampling mask length 3 exceeds disaggregation metadata capacity 2. Increase {VARIABLE}."
    )


def test_a_mask_that_fills_its_room_fits() -> None:
    buffers = MetadataBuffers(slots=1, max_sampling_mask_tokens=3)
    buffers.set_buf(0, MASKED)
    assert buffers.get_buf(0, wants_sampling_mask=True).sampling_mask == [7, 3, 9]


def test_more_top_logprobs_than_room_are_refused() -> None:
    with pytest.raises(RuntimeError) as caught:
        MetadataBuffers(slots=1, max_top_logprobs=1).set_buf(
            0, FirstToken(7, top_logprobs=[-1.0, -2.0], top_ids=[7, 8])
        )
    assert str(caught.value) == (
        "top_logprobs_num 2 exceeds disaggregation metadata capacity 1. "
        "Lower top_logprobs_num or increase the metadata buffer."
    )


def test_a_wanted_mask_that_is_absent_is_minus_one_and_read_as_none() -> None:
    buffers = MetadataBuffers(slots=1, max_sampling_mask_tokens=3)
    buffers.set_buf(0, FirstToken(7, wants_sampling_mask=True))
    assert buffers.tensors()["mask_lengths"].tolist() == [-1]
    assert buffers.get_buf(0, wants_sampling_mask=True).sampling_mask is None


def test_an_empty_mask_is_zero_and_read_as_an_empty_list() -> None:
    buffers = MetadataBuffers(slots=1, max_sampling_mask_tokens=3)
    buffers.set_buf(0, FirstToken(7, wants_sampling_mask=True, sampling_mask=[]))
    assert buffers.tensors()["mask_lengths"].tolist() == [0]
    assert buffers.get_buf(0, wants_sampling_mask=True).sampling_mask == []


BAD = {
    "mask too long": replace(MASKED, sampling_mask=[1] * 9),
    "too many top logprobs": replace(MASKED, top_logprobs=[-1.0], top_ids=[1]),
    "NaN": replace(MASKED, logprob=math.nan),
    "NaN in the mask": replace(MASKED, sampling_logprob=math.nan),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_a_refused_request_leaves_nothing_of_the_older_one_readable(bad: FirstToken) -> None:
    buffers = MetadataBuffers(slots=1, max_sampling_mask_tokens=3)
    buffers.set_buf(0, MASKED)
    with pytest.raises(RuntimeError):
        buffers.set_buf(0, bad)
    assert buffers.tensors()["mask_lengths"].tolist() == [-1]
    with pytest.raises(RuntimeError, match="slot 0 holds no first token"):
        buffers.get_buf(0, wants_sampling_mask=True)


@pytest.mark.parametrize(
    "later", [FirstToken(8), FirstToken(8, sampling_mask=[8, 1]), FirstToken(8, wants_sampling_mask=True)],
    ids=["did not ask", "did not ask but has one", "asked and has none"],
)  # fmt: skip
def test_a_later_request_without_a_mask_resets_the_slot(later: FirstToken) -> None:
    buffers = MetadataBuffers(slots=1, max_sampling_mask_tokens=3)
    buffers.set_buf(0, MASKED)
    buffers.set_buf(0, later)
    read = buffers.get_buf(0, wants_sampling_mask=True)
    assert (read.token_id, read.sampling_mask, read.sampling_logprob) == (8, None, None)


def test_readers_slice_by_length() -> None:
    buffers = MetadataBuffers(slots=1, max_top_logprobs=3, max_sampling_mask_tokens=3)
    buffers.set_buf(0, replace(MASKED, top_logprobs=[-1.0, -2.0, -3.0], top_ids=[1, 2, 3]))
    short = FirstToken(
        9, top_logprobs=[-4.0], top_ids=[4], wants_sampling_mask=True, sampling_mask=[9], sampling_logprob=0.0
    )
    buffers.set_buf(0, short)
    assert buffers.get_buf(0, wants_sampling_mask=True) == short


def test_a_reader_that_wants_no_mask_gets_none() -> None:
    buffers = MetadataBuffers(slots=1, max_sampling_mask_tokens=3)
    buffers.set_buf(0, MASKED)
    assert buffers.get_buf(0).sampling_mask is None


@pytest.mark.parametrize(
    "field", [{"logprob": math.nan}, {"top_logprobs": [math.nan], "top_ids": [1]}, {"sampling_logprob": math.nan}]
)
def test_a_logprob_that_is_nan_is_refused_by_name(field: dict[str, float]) -> None:
    buffers = MetadataBuffers(slots=1, max_top_logprobs=2, max_sampling_mask_tokens=3)
    with pytest.raises(RuntimeError, match=f"^{next(iter(field))} of first token 7 is NaN"):
        buffers.set_buf(0, replace(MASKED, **field))


def test_a_logprob_that_was_not_asked_for_stays_absent() -> None:
    buffers = MetadataBuffers(slots=1)
    buffers.set_buf(0, FirstToken(7))
    assert buffers.get_buf(0) == FirstToken(7, top_logprobs=[], top_ids=[])


@pytest.mark.parametrize("first", [FirstToken(-1), FirstToken(7, top_logprobs=[-1.0])])
def test_a_first_token_that_does_not_hold_together_is_refused(first: FirstToken) -> None:
    with pytest.raises(RuntimeError, match="needs an id >= 0 and one id per top log-probability"):
        MetadataBuffers(slots=1, max_top_logprobs=2).set_buf(0, first)


@pytest.mark.parametrize("slot", [-1, 2])
def test_a_slot_that_does_not_exist_is_refused(slot: int) -> None:
    buffers = MetadataBuffers(slots=2)
    with pytest.raises(ValueError, match=f"slot {slot} does not exist"):
        buffers.set_buf(slot, FirstToken(1))
    with pytest.raises(ValueError, match=f"slot {slot} does not exist"):
        buffers.get_buf(slot)


@pytest.mark.parametrize(
    "sizes", [{"slots": 0}, {"slots": 1, "max_top_logprobs": -1}, {"slots": 1, "max_sampling_mask_tokens": -1}]
)
def test_impossible_sizes_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least one slot and no negative capacity"):
        MetadataBuffers(**sizes)
