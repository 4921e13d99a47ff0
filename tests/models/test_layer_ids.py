"""What a layer id means, and which lists of them are refused."""

import pytest

from hiddentap.models.default_ids import default_layer_ids
from hiddentap.models.layer_ids import (
    LayerIdError,
    LayerIdTypeError,
    check_layer_ids,
    from_boundaries,
    to_boundaries,
)


def test_a_layer_output_id_is_the_boundary_after_that_layer() -> None:
    assert to_boundaries([0, 2, 3], 4, "layer_output") == (1, 3, 4)


def test_a_boundary_id_is_itself_from_the_embeddings_to_the_last_layer() -> None:
    assert to_boundaries([0, 1, 4], 4, "boundary") == (0, 1, 4)


@pytest.mark.parametrize("convention", ["layer_output", "boundary"])
def test_conversion_there_and_back_is_lossless(convention: str) -> None:
    assert from_boundaries(to_boundaries([0, 2, 3], 4, convention), convention) == (0, 2, 3)


def test_the_embeddings_have_no_layer_output_id() -> None:
    with pytest.raises(LayerIdError, match=r"boundary 0 .* has no id under the layer_output convention"):
        from_boundaries((0, 3), "layer_output")


def test_an_unknown_convention_is_refused_by_name() -> None:
    with pytest.raises(
        LayerIdError, match="unknown layer-id convention 'sglang'; expected one of layer_output, boundary"
    ):
        to_boundaries([1], 4, "sglang")  # type: ignore[arg-type]


BAD_VALUES = [
    (None, ValueError, "DSPARK requires explicit layer_ids for aux hidden capture."),
    ([], ValueError, "DSPARK requires at least one target layer for aux hidden capture."),
    ([1, 1], ValueError, "DSPARK target layer_ids must be unique and strictly increasing."),
    ([2, 1], ValueError, "DSPARK target layer_ids must be unique and strictly increasing."),
    ([-1], ValueError, "DSPARK target layer_ids are outside the decoder range: [-1]; num_hidden_layers=4."),
    ([4], ValueError, "DSPARK target layer_ids are outside the decoder range: [4]; num_hidden_layers=4."),
    ([0, 4, 7], ValueError, "DSPARK target layer_ids are outside the decoder range: [4, 7]; num_hidden_layers=4."),
    ([True], TypeError, "DSPARK target layer_ids must be plain integers; got True (bool)."),
    ([1.0], TypeError, "DSPARK target layer_ids must be plain integers; got 1.0 (float)."),
    (["1"], TypeError, "DSPARK target layer_ids must be plain integers; got '1' (str)."),
    ("1", TypeError, "DSPARK target layer_ids must be a list of plain integers; got '1'."),
    (1, TypeError, "DSPARK target layer_ids must be a list of plain integers; got 1."),
]


@pytest.mark.parametrize(("layer_ids", "error", "text"), BAD_VALUES, ids=[repr(b[0]) for b in BAD_VALUES])
def test_each_bad_list_has_its_own_error(layer_ids: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        check_layer_ids(layer_ids, 4, algorithm="DSPARK")  # type: ignore[arg-type]
    assert str(caught.value).startswith(text)


def test_the_type_is_looked_at_before_the_order_and_the_order_before_the_range() -> None:
    with pytest.raises(LayerIdTypeError):
        check_layer_ids([9, 9, "x"], 4, algorithm="DSPARK")  # type: ignore[list-item]
    with pytest.raises(LayerIdError, match="strictly increasing"):
        check_layer_ids([9, 9], 4, algorithm="DSPARK")


def test_boundary_ids_have_a_range_of_their_own() -> None:
    with pytest.raises(LayerIdError, match=r"boundary ids are outside 0\.\.4: \[5\]"):
        to_boundaries([0, 5], 4, "boundary")


@pytest.mark.parametrize(
    ("algorithm", "n", "expected"),
    [
        ("eagle3", 36, (1, 17, 32)),
        ("eagle3", 7, (1, 2, 3)),
        ("dflash", 36, (1, 9, 17, 25, 33)),
        ("dspark", 36, (1, 10, 18, 26, 35)),
        ("dflash", 30, (1, 8, 14, 20, 27)),
    ],
)
def test_default_layers_are_those_of_the_published_recipes(algorithm: str, n: int, expected: tuple[int, ...]) -> None:
    assert default_layer_ids(algorithm, n) == expected  # type: ignore[arg-type]


def test_one_draft_layer_takes_one_layer() -> None:
    assert default_layer_ids("dflash", 36, draft_layers=1) == (18,)
    assert default_layer_ids("dspark", 36, draft_layers=1) == (35,)


def test_too_few_layers_for_a_default_are_said_so() -> None:
    with pytest.raises(LayerIdError, match=r"EAGLE3 default layers need num_hidden_layers >= 7; got 6\."):
        default_layer_ids("eagle3", 6)
    with pytest.raises(LayerIdError, match="do not fit 5 decoder layers"):
        default_layer_ids("dflash", 5)
