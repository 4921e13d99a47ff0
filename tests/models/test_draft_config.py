"""Target layers from a drafter's config.json: every published form, and never a guess at what the numbers mean."""

import json
from pathlib import Path
from typing import Any

import pytest

from hiddentap.models.draft_config import DraftConfigError, read_draft_config
from hiddentap.models.layer_ids import LayerIdError, LayerIdTypeError

FORMS: list[tuple[dict[str, Any], str, str, tuple[int, ...]]] = [
    (
        {"num_hidden_layers": 1, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32], "use_aux_hidden_state": True}},
        "eagle_config.eagle_aux_hidden_state_layer_ids",
        "sglang",
        (2, 18, 33),
    ),
    ({"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}, "eagle_aux_hidden_state_layer_ids", "vllm", (2, 18, 33)),
    (
        {"num_target_layers": 36, "dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 7}},
        "dflash_config.target_layer_ids",
        "dflash",
        (2, 10, 18, 26, 34),
    ),
    ({"dspark_config": {"target_layer_ids": [0, 34]}}, "dspark_config.target_layer_ids", "deepspec", (1, 35)),
    ({"dspark_target_layer_ids": [33, 34, 35]}, "dspark_target_layer_ids", "sglang_dspark", (34, 35, 36)),
    ({"target_layer_ids": [-1, 9]}, "target_layer_ids", "automodel_dspark", (0, 10)),
    (
        {
            "speculators_model_type": "dflash", "aux_hidden_state_layer_ids": [2, 18, 33],
            "transformer_layer_config": {"num_hidden_layers": 5},
        },
        "aux_hidden_state_layer_ids",
        "speculators",
        (2, 18, 33),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("config", "field", "system", "boundaries"), FORMS, ids=[form[1] for form in FORMS])
def test_each_form_is_read_under_the_system_that_is_named(
    tmp_path: Path, config: dict[str, Any], field: str, system: str, boundaries: tuple[int, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    for source in (tmp_path, tmp_path / "config.json", str(tmp_path), config):
        read = read_draft_config(source)
        assert read.field == field
        assert read.boundaries(36, system, ["kimi_k3"]) == boundaries


def test_the_same_numbers_are_other_layers_under_another_system() -> None:
    config = read_draft_config({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}})
    assert config.boundaries(36, "vllm") == (2, 18, 33)
    assert config.boundaries(36, "specforge") == (3, 19, 34)
    assert config.boundaries(36, "sglang", ["llama"]) == (3, 19, 34)
    assert config.boundaries(36, "sglang", ["deepseek_v3"]) == (2, 18, 33)


# What vLLM 0.32 captures, by the field: states as they stand, outputs with 1 added.
IN_VLLM = [
    ({"dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33]}}, (2, 10, 18, 26, 34)),
    ({"dspark_target_layer_ids": [1, 9]}, (2, 10)),
    ({"dspark_target_layer_ids": [1, 9], "model_type": "deepseek_v41"}, (1, 9)),
    ({"target_layer_ids": [1, 9, 35]}, (2, 10, 36)),
    ({"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}, (2, 18, 33)),
    ({"aux_hidden_state_layer_ids": [2, 18, 33]}, (2, 18, 33)),
    ({"text_config": {"dflash_config": {"target_layer_ids": [1, 9]}}}, (2, 10)),
]


@pytest.mark.parametrize(("config", "boundaries"), IN_VLLM, ids=[str(list(c)) for c, _ in IN_VLLM])
def test_vllm_shifts_the_ids_of_some_fields(config: dict[str, Any], boundaries: tuple[int, ...]) -> None:
    assert read_draft_config(config).boundaries(36, "vllm") == boundaries


def test_speculators_shifts_the_ids_of_a_block_drafter_that_it_converts() -> None:
    assert read_draft_config({"dflash_config": {"target_layer_ids": [1, 9]}}).boundaries(36, "speculators") == (2, 10)
    assert read_draft_config({"aux_hidden_state_layer_ids": [1, 9]}).boundaries(36, "speculators") == (1, 9)


def test_a_field_that_the_runners_of_vllm_read_differently_is_refused_with_the_way_out() -> None:
    kimi = read_draft_config({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]}})
    with pytest.raises(
        LayerIdError,
        match=r"V1 captures \[1, 29, 57\], V2 does not read it and captures its default \[2, 30, 58\].*layer_output",
    ):
        kimi.boundaries(61, "vllm")
    assert kimi.boundaries(61, "sglang", ["kimi_k2"]) == (2, 30, 58)
    assert kimi.boundaries(61, "layer_output") == (2, 30, 58)
    assert kimi.boundaries(61, "boundary") == (1, 29, 57)
    both = read_draft_config({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}})
    assert both.boundaries(61, "vllm") == (2, 30, 58)


@pytest.mark.parametrize(
    ("config", "system"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [2, 18]}, "sglang"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 18]}, "specforge"),
        ({"aux_hidden_state_layer_ids": [2, 18]}, "dflash"),
        ({"dspark_config": {"target_layer_ids": [2, 18]}}, "vllm"),
        ({"target_layer_ids": [2, 18]}, "speculators"),
        ({"text_config": {"aux_hidden_state_layer_ids": [2, 18]}}, "modelopt"),
    ],
)
def test_a_field_that_the_named_system_does_not_read_is_refused(config: dict[str, Any], system: str) -> None:
    read = read_draft_config(config)
    with pytest.raises(
        DraftConfigError, match=rf"{system} does not read {read.field}, .*\[2, 18\]; it reads .*--algorithm"
    ):
        read.boundaries(36, system, ["llama"])
    assert read.boundaries(36, "boundary") == (2, 18)


def test_a_drafter_of_deepseek_v4_names_the_last_layers_of_its_target() -> None:
    read = read_draft_config({"dspark_target_layer_ids": [33, 34, 35]})
    assert read.boundaries(36, "sglang", ["deepseek_v4"]) == (34, 35, 36)
    with pytest.raises(LayerIdError, match="never captures it"):
        read.boundaries(36, "sglang", ["qwen3"])


def test_the_drafter_own_depth_and_its_targets_are_told_apart() -> None:
    read = read_draft_config({"num_hidden_layers": 5, "num_target_layers": 36, "target_layer_ids": [1]})
    assert (read.draft_layers, read.target_layers) == (5, 36)
    nested = read_draft_config(FORMS[6][0])
    assert (nested.draft_layers, nested.target_layers) == (5, None)


def test_a_drafter_for_another_target_is_refused() -> None:
    read = read_draft_config({"num_target_layers": 36, "target_layer_ids": [1]})
    with pytest.raises(DraftConfigError, match=r"for a target of 36 decoder layers .*; this model has 30"):
        read.boundaries(30, "dflash")


def test_fields_that_disagree_have_to_be_chosen_from() -> None:
    config = {
        "target_layer_ids": [1, 9],
        "eagle_aux_hidden_state_layer_ids": [2, 10],
        "dspark_target_layer_ids": [1, 9],
    }
    with pytest.raises(
        DraftConfigError,
        match=r"different layer ids.*eagle_aux_hidden_state_layer_ids = \[2, 10\].*target_layer_ids = \[1, 9\]",
    ):
        read_draft_config(config)
    assert read_draft_config(config, field="eagle_aux_hidden_state_layer_ids").boundaries(36, "vllm") == (2, 10)
    assert read_draft_config(config, field="target_layer_ids").boundaries(36, "dflash") == (2, 10)


def test_fields_that_agree_are_one() -> None:
    config = {"target_layer_ids": [1, 9], "dspark_target_layer_ids": [1, 9]}
    assert read_draft_config(config).layer_ids == (1, 9)


def test_a_config_without_target_layers_is_refused_with_the_known_fields(tmp_path: Path) -> None:
    with pytest.raises(
        DraftConfigError, match=r"has no field with target layers; known are eagle_config\.eagle_aux.*--algorithm"
    ):
        read_draft_config({"model_type": "llama"})
    with pytest.raises(DraftConfigError, match="has no target_layer_ids"):
        read_draft_config({"dspark_target_layer_ids": [1]}, field="target_layer_ids")


def test_a_drafter_that_says_it_takes_no_layers_is_refused() -> None:
    config = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": False}}
    with pytest.raises(DraftConfigError, match="use_aux_hidden_state = false"):
        read_draft_config(config)


@pytest.mark.parametrize(
    ("ids", "error", "text"),
    [
        ([], LayerIdError, "target_layer_ids requires at least one target layer"),
        ([33, 2, 18], LayerIdError, r"strictly increasing\. Got \[33, 2, 18\]"),
        ([1, 1], LayerIdError, "unique and strictly increasing"),
        ([1.0], LayerIdTypeError, "plain integers; got 1.0"),
        ("1,2", LayerIdTypeError, "a list of plain integers; got '1,2'"),
        (7, LayerIdTypeError, "a list of plain integers; got 7"),
    ],
)
def test_ids_that_are_no_list_of_layers_are_refused(ids: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        read_draft_config({"target_layer_ids": ids})


def test_files_that_are_no_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DraftConfigError, match=r"cannot read the draft config .*absent"):
        read_draft_config(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DraftConfigError, match="is no JSON"):
        read_draft_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(DraftConfigError, match="holds a list; expected an object"):
        read_draft_config(tmp_path)
