"""`generate()` of mixin models: every step's rows have the values and the places that one plain forward gives them."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from hiddentap.capture.mixin import with_capture
from hiddentap.hooks import PositionsError, TapError
from support import architectures, tiny

PROMPT = tiny.token_ids(2, 6)
LEFT_PADDED = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
STEPS = [((4, 6), (0, 0)), ((1, 1), (4, 6)), ((1, 1), (5, 7))]


def capturing(model: nn.Module, layer_ids: list[int]) -> nn.Module:
    model = with_capture(model)
    model.set_dspark_layers_to_capture(layer_ids)
    return model


def generated(model: nn.Module, prompt: torch.Tensor = PROMPT, mask: torch.Tensor | None = LEFT_PADDED, **settings):
    """The tokens, and the auxiliary output of each captured forward."""
    seen = []
    model.on_auxiliary_output = seen.append
    tokens = model.generate(
        prompt, attention_mask=mask, max_new_tokens=3, do_sample=False, eos_token_id=None, **settings
    )
    return tokens, seen


def places(seen: list) -> list:
    return [(output.layout.row_counts, output.layout.first_positions) for output in seen]


@pytest.mark.parametrize("settings", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "kimi_linear"])
def test_left_padded_rows_have_their_real_places_whatever_the_cache(family: str, settings: dict) -> None:
    tokens, seen = generated(capturing(tiny.build(family), [0, 3]), **settings)
    assert places(seen) == STEPS
    plain = tiny.build(family).generate(
        PROMPT, attention_mask=LEFT_PADDED, max_new_tokens=3, do_sample=False, eos_token_id=None, **settings
    )
    assert torch.equal(tokens, plain)


@pytest.mark.parametrize("settings", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
def test_rows_of_all_steps_are_the_states_of_one_forward_over_what_was_generated(settings: dict) -> None:
    tokens, seen = generated(capturing(tiny.build("llama"), [0, 2]), **settings)
    for b, start in enumerate((2, 0)):
        row = tokens[b : b + 1, start:-1]
        hs = tiny.build("llama")(row, output_hidden_states=True, use_cache=False).hidden_states
        expected = torch.stack([hs[1][0], hs[3][0]], 1)
        prefill = seen[0].aux_hidden_states[: 4 if b == 0 else None][-(4 if b == 0 else 6) :]
        rows = torch.cat([prefill, *[output.aux_hidden_states[b : b + 1] for output in seen[1:]]])
        torch.testing.assert_close(rows, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model_type", ["mamba", "mamba2"])
def test_a_cache_of_recurrent_states_alone_is_counted_by_the_captured_calls(model_type: str) -> None:
    _, seen = generated(capturing(architectures.build(model_type), [0, 3]))
    assert places(seen) == STEPS


def test_a_recurrent_cache_that_was_filled_before_capture_began_is_refused() -> None:
    model = with_capture(architectures.build("mamba"))
    cache = model(PROMPT, use_cache=True).cache
    model.set_dspark_layers_to_capture([0])
    with pytest.raises(PositionsError, match="holds the state of positions that were not captured"):
        model(PROMPT[:, :1], cache=cache, use_cache=True)


def test_a_cache_without_any_count_is_refused() -> None:
    model = capturing(architectures.build("rwkv"), [0])
    state = model(PROMPT, use_cache=True).state
    with pytest.raises(PositionsError, match="the cache is a list, which cannot tell how many positions it holds"):
        model(PROMPT[:, :1], state=state, use_cache=True)


def test_layers_that_see_only_the_last_position_while_generating_are_refused_with_the_way_out() -> None:
    model = capturing(architectures.build("gemma4_text"), [0, 3])
    with pytest.raises(
        TapError, match=r"boundary 4 gave a float32 tensor \(2, 1, 32\).*in generate\(\), say logits_to_keep=0"
    ):
        generated(model)
    _, seen = generated(model, logits_to_keep=0)
    assert places(seen) == STEPS
    earlier = capturing(architectures.build("gemma4_text"), [0])
    assert places(generated(earlier)[1]) == STEPS


def test_beams_and_drafted_tokens_are_rows_like_others() -> None:
    _, seen = generated(capturing(tiny.build("llama"), [1]), num_beams=2)
    assert places(seen)[0] == ((4, 4, 6, 6), (0, 0, 0, 0))
    repeated = torch.tensor([[11, 12, 13, 14, 11, 12, 13]])
    tokens, seen = generated(capturing(tiny.build("llama"), [1]), repeated, None, prompt_lookup_num_tokens=2)
    first = places(seen)[1:]
    assert [start for _, (start,) in first] == sorted({start for _, (start,) in first})
    assert tokens.shape == (1, 10)


def test_a_mask_of_a_callers_own_form_still_needs_lengths() -> None:
    model = capturing(tiny.build("llama"), [1])
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    with pytest.raises(PositionsError, match="give lengths= as well"):
        model(PROMPT, attention_mask=mask)
    assert model(PROMPT, attention_mask=mask, lengths=[6, 6]).auxiliary_device_output.layout.row_counts == (6, 6)


@pytest.mark.parametrize(
    "make", [lambda: tiny.build("llama"), lambda: tiny.build("kimi_linear")], ids=["llama", "kimi"]
)
def test_what_generate_may_be_given_is_what_it_was(make: Callable[[], nn.Module]) -> None:
    plain, model = make(), with_capture(make())
    for name in ("nonsense", "capture_attention_mask"):
        with pytest.raises(ValueError, match=name):
            plain.generate(PROMPT, max_new_tokens=1, **{name: 1})
        with pytest.raises(ValueError, match=name):
            model.generate(PROMPT, max_new_tokens=1, **{name: 1})
