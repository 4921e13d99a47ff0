"""Default layers of each system, as its own sources compute them."""

import itertools
import math

import pytest

from hiddentap.models.default_ids import FORMULAS, default_ids
from hiddentap.models.id_systems import boundaries_of, convert_layer_ids, states_of
from hiddentap.models.layer_ids import LayerIdError

N36 = [
    ("eagle3", "specforge", (1, 17, 32)),
    ("eagle3", "modelopt", (1, 17, 32)),
    ("eagle3", "speculators", (2, 18, 33)),
    ("eagle3", "eagle", (2, 18, 33)),
    ("dflash", "specforge", (1, 9, 17, 25, 33)),
    ("dflash", "dflash", (1, 9, 17, 25, 33)),
    ("dflash", "speculators", (2, 18, 33)),
    ("dflash", "sglang", (1, 9, 17, 25, 33)),
    ("dflash", "sglang_dflash", (1, 9, 17, 25, 33)),
    ("dflash", "angelslim", (1, 9, 17, 25, 33)),
    ("dspark", "specforge", (1, 9, 17, 25, 33)),
    ("dspark", "automodel_dspark", (1, 10, 18, 26, 35)),
    ("mtp", "speculators", (36,)),
]


@pytest.mark.parametrize(("algorithm", "system", "expected"), N36)
def test_defaults_for_36_layers(algorithm: str, system: str, expected: tuple[int, ...]) -> None:
    assert default_ids(system, algorithm, 36) == expected


def test_all_eagle3_defaults_are_the_same_layers() -> None:
    systems = [name for algorithm, name in FORMULAS if algorithm == "eagle3"]
    for n in range(7, 129):
        assert {boundaries_of(default_ids(name, "eagle3", n), n, name) for name in systems} == {(2, n // 2, n - 3)}
        assert boundaries_of(None, n, "sglang") == (2, n // 2, n - 3)


def test_halves_are_rounded_to_even() -> None:
    assert 1 + 1 * (14 - 4) / 4 == 3.5
    assert default_ids("specforge", "dflash", 14) == (1, 4, 6, 8, 11)
    assert 1 + 1 * (12 - 2) / 4 == 3.5
    assert default_ids("automodel_dspark", "dspark", 12) == (1, 4, 6, 8, 11)
    differing = [
        n
        for n in range(12, 129)
        if default_ids("specforge", "dflash", n) != tuple(math.floor(1.5 + i * (n - 4) / 4) for i in range(5))
    ]
    assert differing[:3] == [14, 15, 18]


@pytest.mark.parametrize(("algorithm", "system"), FORMULAS)
def test_defaults_are_ids_of_their_system_or_are_refused(algorithm: str, system: str) -> None:
    for n, draft_layers in itertools.product(range(1, 129), (1, 2, 5)):
        try:
            ids = default_ids(system, algorithm, n, draft_layers=draft_layers, model_types=["llama"])
        except LayerIdError as refused:
            assert f"do not fit {n} decoder layers" in str(refused)  # noqa: PT017
            assert n < 12
        else:
            assert len(states_of(ids, n, system, ["llama"])) == len(set(ids))


def test_one_draft_layer_takes_one_layer() -> None:
    assert default_ids("dflash", "dflash", 36, draft_layers=1) == (18,)
    assert default_ids("automodel_dspark", "dspark", 36, draft_layers=1) == (35,)


def test_an_algorithm_without_a_default_is_refused_with_the_systems_that_have_one() -> None:
    with pytest.raises(
        LayerIdError, match=r"deepspec has no default layers for 'eagle3'.*Systems that have: layer_output"
    ):
        default_ids("deepspec", "eagle3", 36)
    with pytest.raises(LayerIdError, match=r"no default layers for 'medusa'.*Systems that have: none"):
        default_ids("vllm", "medusa", 36)


def test_a_default_of_one_system_is_told_in_the_ids_of_another() -> None:
    ids = default_ids("specforge", "dflash", 36)
    assert convert_layer_ids(ids, 36, of="specforge", to="vllm") == (2, 10, 18, 26, 34)


def test_one_family_of_sglang_takes_later_layers_by_default() -> None:
    assert default_ids("sglang", "eagle3", 60) == (1, 29, 56)
    assert default_ids("sglang", "eagle3", 60, model_types=["deepseek_v3"]) == (1, 29, 56)
    assert default_ids("sglang", "eagle3", 60, model_types=["minimax_m3_vl"]) == (2, 30, 57)
