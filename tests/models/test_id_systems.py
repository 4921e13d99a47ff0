"""Layer ids of every system: what each names, and conversions that lose nothing or are refused with the reason."""

import itertools

import pytest

from hiddentap.models.id_systems import (
    SYSTEMS,
    TappedState,
    boundaries_of,
    convert_layer_ids,
    ids_of,
    states_of,
)
from hiddentap.models.layer_ids import LayerIdError, LayerIdTypeError

# For a model of 4 layers: id -> boundary, "post" for the state after the final norm. What is not listed is no id.
OUTPUTS_BUT_THE_LAST = {0: 1, 1: 2, 2: 3}
OUTPUTS = OUTPUTS_BUT_THE_LAST | {3: 4}
OUTPUTS_NORMED_AT_LAST = OUTPUTS_BUT_THE_LAST | {3: "post"}
STATES = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4}
MEANING: dict[str, dict[int, int | str]] = {
    "layer_output": OUTPUTS,
    "boundary": STATES,
    "specforge": OUTPUTS_BUT_THE_LAST,
    "sglang": OUTPUTS_BUT_THE_LAST,
    "sglang_dflash": OUTPUTS_BUT_THE_LAST,
    "sglang_dspark": OUTPUTS_BUT_THE_LAST,
    "vllm": STATES,
    "speculators": STATES,
    "eagle": {0: 0, 1: 1, 2: 2, 3: 3},
    "deepspec": {-1: 0, 0: 1, 1: 2, 2: 3},
    "torchspec": OUTPUTS,
    "automodel_eagle3": OUTPUTS,
    "automodel_dflash": OUTPUTS,
    "automodel_dspark": {-1: 0, 0: 1, 1: 2, 2: 3, 3: "post"},
    "automodel_vllm": OUTPUTS_BUT_THE_LAST,
    "modelopt": OUTPUTS_NORMED_AT_LAST,
    "angelslim": OUTPUTS_NORMED_AT_LAST,
    "angelslim_vllm": OUTPUTS,
    "dflash": OUTPUTS_NORMED_AT_LAST,
    "transformers": OUTPUTS_NORMED_AT_LAST,
}
PAIRS = list(itertools.product(MEANING, MEANING))
# SGLang reads ids by the model's type; most types are read as this one.
LLAMA = ("llama",)


def state(meaning: int | str) -> TappedState:
    return TappedState(4, normed=True) if meaning == "post" else TappedState(int(meaning))


def test_every_system_is_in_the_table() -> None:
    assert list(MEANING) == list(SYSTEMS)


@pytest.mark.parametrize("system", MEANING)
def test_each_id_names_its_state_and_what_is_no_id_is_refused(system: str) -> None:
    for i in range(-4, 8):
        if i in MEANING[system]:
            assert states_of([i], 4, system, LLAMA) == (state(MEANING[system][i]),)
            assert ids_of([state(MEANING[system][i])], 4, system, LLAMA) == (i,)
        else:
            with pytest.raises(LayerIdError, match=rf"{system} id"):
                states_of([i], 4, system, LLAMA)


@pytest.mark.parametrize("system", MEANING)
def test_states_that_no_id_names_are_refused(system: str) -> None:
    named = {state(meaning) for meaning in MEANING[system].values()}
    for other in {TappedState(b) for b in range(5)} | {TappedState(4, normed=True)} - named:
        if other not in named:
            with pytest.raises(LayerIdError, match=system):
                ids_of([other], 4, system, LLAMA)


@pytest.mark.parametrize(("of", "to"), PAIRS)
def test_every_list_converts_without_loss_or_is_refused(of: str, to: str) -> None:
    by_state = {meaning: i for i, meaning in MEANING[to].items()}
    for length in range(1, 6):
        for ids in itertools.combinations(sorted(MEANING[of]), length):
            meanings = [MEANING[of][i] for i in ids]
            if all(meaning in by_state for meaning in meanings):
                there = convert_layer_ids(ids, 4, of=of, to=to, model_types=LLAMA)
                assert there == tuple(by_state[meaning] for meaning in meanings)
                assert convert_layer_ids(there, 4, of=to, to=of, model_types=LLAMA) == ids
            else:
                with pytest.raises(LayerIdError):
                    convert_layer_ids(ids, 4, of=of, to=to, model_types=LLAMA)


@pytest.mark.parametrize("system", MEANING)
@pytest.mark.parametrize("n", [1, 2, 3, 7, 36])
def test_round_trips_hold_for_any_depth(system: str, n: int) -> None:
    low, high = SYSTEMS[system].lowest(), SYSTEMS[system].highest(n) - (SYSTEMS[system].last == "never")
    for i in range(low, high + 1):
        assert ids_of(states_of([i], n, system, LLAMA), n, system, LLAMA) == (i,)
    with pytest.raises(LayerIdError):
        states_of([high + 1], n, system, LLAMA)
    with pytest.raises(LayerIdError):
        states_of([low - 1], n, system, LLAMA)


@pytest.mark.parametrize(
    ("of", "to", "layer_id", "text"),
    [
        ("specforge", "vllm", 3, "specforge id 3 of 4 decoder layers gives no state: SGLang accepts that id and never"),
        ("deepspec", "torchspec", 3, "before the final norm and evaluates after it"),
        ("vllm", "sglang", 4, "sglang has no id that gives boundary 4: SGLang accepts that id"),
        ("vllm", "modelopt", 4, "modelopt id 3 gives boundary 4 after the final norm, not boundary 4"),
        (
            "modelopt",
            "vllm",
            3,
            "vllm id 4 gives boundary 4 before the final norm, not boundary 4 after the final norm",
        ),
        ("vllm", "specforge", 0, r"specforge has no id for the embeddings \(boundary 0\)"),
        ("automodel_dspark", "eagle", 3, "eagle has no id that gives boundary 4 after the final norm: nothing enters"),
    ],
)
def test_the_last_layer_and_the_embeddings_are_refused_with_the_reason(
    of: str, to: str, layer_id: int, text: str
) -> None:
    with pytest.raises(LayerIdError, match=text):
        convert_layer_ids([layer_id], 4, of=of, to=to)


@pytest.mark.parametrize("n", range(1, 65))
def test_sglang_without_ids_takes_other_layers_than_with_the_same_numbers(n: int) -> None:
    numbers = (2, n // 2, n - 3)
    if not 2 < n // 2 < n - 3:
        with pytest.raises(LayerIdError, match=f"do not fit {n} decoder layers"):
            states_of(None, n, "sglang")
        return
    assert boundaries_of(None, n, "sglang") == numbers
    assert boundaries_of(numbers, n, "sglang", LLAMA) == tuple(i + 1 for i in numbers)
    assert convert_layer_ids(None, n, of="sglang", to="specforge") == tuple(i - 1 for i in numbers)


def test_other_systems_need_their_ids() -> None:
    with pytest.raises(LayerIdError, match="specforge requires explicit layer_ids"):
        states_of(None, 36, "specforge")


def test_a_state_after_the_final_norm_is_no_boundary() -> None:
    assert boundaries_of([-1, 2], 4, "automodel_dspark") == (0, 3)
    with pytest.raises(
        LayerIdError, match=r"automodel_dspark id 3 is the state after the final norm.*take it as post-norm"
    ):
        boundaries_of([1, 3], 4, "automodel_dspark")


def test_unknown_systems_and_bad_lists_are_refused() -> None:
    with pytest.raises(
        LayerIdError, match=r"unknown system of layer ids 'automodel'; expected one of .*automodel_eagle3"
    ):
        states_of([1], 4, "automodel")
    with pytest.raises(LayerIdTypeError, match="vllm target layer_ids must be plain integers; got True"):
        states_of([True], 4, "vllm")
    with pytest.raises(LayerIdError, match="vllm target layer_ids must be unique and strictly increasing"):
        states_of([2, 1], 4, "vllm")
    with pytest.raises(LayerIdError, match=r"vllm ids \[5\] are outside 0\.\.4 for 4 decoder layers"):
        states_of([1, 5], 4, "vllm")


# SGLang 0.5.23: what its setters capture for a list of ids, by the target's model type, on a model of 61 layers.
BY_MODEL_TYPE = [
    ("sglang", "llama", [2, 30, 58], (3, 31, 59)),
    ("sglang", "qwen3_moe", [0, 30, 59], (1, 31, 60)),
    ("sglang", "deepseek_v3", [2, 30, 58], (2, 30, 58)),
    ("sglang", "kimi_k2", [2, 30, 58], (2, 30, 58)),
    ("sglang", "kimi_k25", [1, 29, 57], (2, 30, 58)),
    ("sglang", "glm_moe_dsa", [0, 30, 60], (0, 30, 60)),
    ("sglang", "glm4_moe_lite", [1, 30], (2, 31)),
    ("sglang", "glm4_moe", [2, 30], (3, 31)),
    ("sglang", "gpt_oss", [2, 30, 61], (2, 30, 61)),
    ("sglang", "gpt_oss", [2, 30, 60], (3, 31, 61)),
    ("sglang", "gemma3_text", [1, 60], (2, 61)),
    ("sglang", "minimax_m3_vl", [1, 60], (2, 61)),
    ("sglang", "deepseek_v3", None, (2, 30, 58)),
    ("sglang", "minimax_m3_vl", None, (3, 31, 59)),
    ("sglang_dflash", "deepseek_v3", [2, 30, 58], (3, 31, 59)),
    ("sglang_dflash", "gpt_oss", [2, 60], (3, 61)),
    ("sglang_dflash", "laguna", [2, 60], (3, 61)),
    ("sglang_dflash", "lfm2_moe", [2, 60], (3, 61)),
    ("sglang_dflash", "mimo_v2_flash", [2, 60], (3, 61)),
    ("sglang_dflash", "nemotron_h", [2, 60], (3, 61)),
    ("sglang_dspark", "kimi_k3", [2, 60], (3, 61)),
    ("sglang_dspark", "deepseek_v4", [58, 59, 60], (59, 60, 61)),
    ("sglang_dspark", "deepseek_v41", [58, 59, 60], (58, 59, 60)),
]


@pytest.mark.parametrize(("system", "model_type", "ids", "boundaries"), BY_MODEL_TYPE)
def test_sglang_ids_name_other_layers_by_the_models_type(
    system: str, model_type: str, ids: list[int] | None, boundaries: tuple[int, ...]
) -> None:
    assert boundaries_of(ids, 61, system, ["some_wrapper", model_type]) == boundaries
    back = ids_of([TappedState(b) for b in boundaries], 61, system, [model_type])
    assert boundaries_of(back, 61, system, [model_type]) == boundaries


@pytest.mark.parametrize(
    ("system", "model_type", "ids"),
    [
        ("sglang", "llama", [2, 60]),
        ("sglang", "deepseek_v3", [1, 60]),
        ("sglang", "deepseek_v3", [2, 61]),
        ("sglang", "laguna", [2, 60]),
        ("sglang_dflash", "qwen3", [2, 60]),
        ("sglang_dspark", "qwen3", [2, 60]),
        ("sglang_dspark", "deepseek_v41", [2, 61]),
    ],
)
def test_a_last_id_that_sglang_never_captures_for_a_model_type_is_refused(
    system: str, model_type: str, ids: list[int]
) -> None:
    with pytest.raises(LayerIdError, match="never captures it"):
        boundaries_of(ids, 61, system, [model_type])


def test_sglang_ids_that_depend_on_the_model_are_refused_where_it_is_not_known() -> None:
    with pytest.raises(
        LayerIdError,
        match=r"sglang ids \[2, 30, 58\] depend on the model: .*boundary 3, boundary 31, boundary 59.* or \(boundary 2, "
        r"boundary 30, boundary 58\).*Name the model's type, or .*layer_output .* or boundary",
    ):
        boundaries_of([2, 30, 58], 61, "sglang")
    with pytest.raises(LayerIdError, match=r"depend on the model: .* or captures none"):
        boundaries_of([2, 60], 61, "sglang_dflash")
    assert boundaries_of([1, 29, 57], 61, "sglang") == (2, 30, 58)
    assert boundaries_of([2, 30, 58], 61, "sglang_dflash") == (3, 31, 59)
    assert convert_layer_ids([2, 30, 58], 61, of="boundary", to="sglang") == (1, 29, 57)
    with pytest.raises(LayerIdError, match="depend on the model"):
        convert_layer_ids([3, 31, 59], 61, of="boundary", to="sglang")


def test_states_that_no_ids_of_a_family_name_are_refused() -> None:
    # Ids that begin with 1 are outputs there and others states, so nothing names the state after layer 0 first.
    with pytest.raises(
        LayerIdError, match="sglang has no ids for boundary 1, boundary 30 on a model of type deepseek_v3"
    ):
        convert_layer_ids([1, 30], 61, of="boundary", to="sglang", model_types=["deepseek_v3"])
    assert convert_layer_ids([3, 30], 61, of="boundary", to="sglang", model_types=["deepseek_v3"]) == (3, 30)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "gpt_oss", "gemma3_text", "llama"])
def test_every_list_of_ids_comes_back_as_the_same_states_in_each_family(model_type: str) -> None:
    for length in (1, 2, 3):
        for ids in itertools.combinations(range(7), length):
            try:
                states = states_of(ids, 6, "sglang", [model_type])
            except LayerIdError:
                continue
            assert states_of(ids_of(states, 6, "sglang", [model_type]), 6, "sglang", [model_type]) == states


def test_muse_glimmers_block_drafts_are_refused_for_their_ids_alone() -> None:
    with pytest.raises(LayerIdError, match=r"by the draft.s architecture.*--ids-of layer_output or --ids-of boundary"):
        boundaries_of([1, 9], 36, "sglang_dflash", ["muse_glimmer"])
