"""Attention a block of rows at a time beside the formula, written out in float64."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hiddentap.models.cpu.blocked_attention import (
    BLOCK,
    LONGEST,
    attention_in_blocks,
    blocked_attention,
    blocks_are_faster,
)
from support import tiny


def random_states(B: int, S: int, heads: int, groups: int, D: int, E: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(S)
    shapes = ((heads, D), (groups, D), (groups, E))
    # As projections give them: heads beside each other, then transposed.
    return tuple(torch.randn(B, S, *shape, generator=generator).to(dtype).transpose(1, 2) for shape in shapes)


def by_the_formula(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    shared, S = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (tensor.double().repeat_interleave(shared, dim=1) for tensor in (key, value))
    scores = torch.einsum("bhid,bhjd->bhij", query.double(), key) * scaling
    weights = scores.masked_fill(torch.ones(S, S).triu(1).bool(), -torch.inf).softmax(-1)
    return torch.einsum("bhij,bhje->bihe", weights, value)


@pytest.mark.parametrize("S", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
@pytest.mark.parametrize(("heads", "groups", "D", "E"), [(4, 4, 16, 16), (6, 2, 8, 8), (4, 1, 16, 16), (4, 4, 24, 16)])
def test_each_row_sees_the_keys_up_to_its_own(S: int, heads: int, groups: int, D: int, E: int) -> None:
    states = random_states(2, S, heads, groups, D, E, torch.float32)
    found = attention_in_blocks(*states, 0.3)
    assert found.shape == (2, S, heads, E)
    assert found.is_contiguous()
    # Sums of at most S products in float32.
    torch.testing.assert_close(found.double(), by_the_formula(*states, 0.3), rtol=0, atol=2e-5)


@pytest.mark.parametrize("scaling", [0.125, 1.0], ids=["scores of about 1", "scores of about 8"])
def test_bfloat16_is_as_near_to_the_formula_as_its_rounding_lets_it_be(scaling: float) -> None:
    states = random_states(2, 300, 6, 2, 64, 64, torch.bfloat16)
    expected = by_the_formula(*states, scaling)
    error = (attention_in_blocks(*states, scaling).double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    # The result alone is rounded, to 8 bits: by at most 2^-9 of each value, or a little more of it just above a power of two.
    assert error.max() < 2**-8


def plain_arguments() -> dict[str, object]:
    query, key, value = random_states(1, 9, 4, 2, 8, 8, torch.float32)
    return {"query": query, "key": key, "value": value, "attention_mask": None}


@pytest.mark.parametrize(
    "other",
    [
        {"attention_mask": torch.ones(1, 1, 9, 9).tril().bool()},
        {"is_causal": False},
        {"position_bias": torch.ones(1, 4, 9, 9)},
        {"query": torch.ones(1, 4, 3, 8)},
        dict(zip(("query", "key", "value"), random_states(1, LONGEST + 1, 4, 2, 8, 8, torch.float32), strict=True)),
    ],
    ids=["mask", "both ways", "bias", "fewer queries than keys", "long"],
)
def test_what_is_not_plain_causal_attention_is_left_to_torch(
    other: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(num_key_value_groups=2)
    arguments = plain_arguments() | other
    monkeypatch.setattr("hiddentap.models.cpu.blocked_attention.attention_in_blocks", never)
    with blocked_attention(), torch.no_grad():
        found, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, **arguments)
    assert torch.equal(found, sdpa_attention_forward(module, **arguments)[0])


def test_what_needs_gradients_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hiddentap.models.cpu.blocked_attention.attention_in_blocks", never)
    arguments = plain_arguments()
    query = arguments["query"]
    assert isinstance(query, Tensor)
    query.requires_grad_()
    with blocked_attention():
        ALL_ATTENTION_FUNCTIONS["sdpa"](SimpleNamespace(num_key_value_groups=2), **arguments)[0].sum().backward()
    assert query.grad is not None


def never(*_: object) -> None:
    raise AssertionError("attention went in blocks")


def test_models_have_it_inside_the_outermost_block_alone() -> None:
    model = AutoModelForCausalLM.from_config(tiny.llama_config(), attn_implementation="sdpa").eval()
    ids = tiny.token_ids(2, 200)
    with torch.no_grad():
        before = model(ids).logits
        with blocked_attention():
            with blocked_attention():
                pass
            inside = model(ids).logits
        after = model(ids).logits
    assert torch.equal(before, after)
    assert not torch.equal(before, inside)
    torch.testing.assert_close(inside, before, rtol=0, atol=1e-5)


@pytest.fixture
def measured_cpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A CPU of the kind on which blocks were measured to be faster."""
    monkeypatch.setattr("torch.cpu._is_avx512_supported", lambda: True)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
    return torch.device("cpu")


def test_only_bfloat16_on_the_cpu_is_faster_so(measured_cpu: torch.device) -> None:
    assert blocks_are_faster(measured_cpu, torch.bfloat16)
    with blocked_attention():
        assert blocks_are_faster(measured_cpu, torch.bfloat16)
    assert not blocks_are_faster(measured_cpu, torch.float32)
    assert not blocks_are_faster(torch.device("cuda"), torch.bfloat16)


def test_an_attention_that_somebody_registered_as_sdpa_is_kept(
    measured_cpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", never)
    assert not blocks_are_faster(measured_cpu, torch.bfloat16)


def test_an_attention_that_somebody_registers_meanwhile_stays() -> None:
    try:
        with blocked_attention():
            AttentionInterface.register("sdpa", never)
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is never
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)
