"""The layers that each system takes where nobody names any, in that system's own ids.

All round half to even, as Python does: a re-implementation with floor(x + 0.5) takes other layers for some n.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from .id_systems import ids_of, states_of, system_named
from .layer_ids import Algorithm, LayerIdError

Formula = Callable[[int, int], list[int]]


def _eagle3_outputs(n: int, _draft_layers: int) -> list[int]:
    return [1, n // 2 - 1, n - 4]


def _eagle3_clamped(n: int, _draft_layers: int) -> list[int]:
    return sorted({1, max(0, n // 2 - 1), max(0, n - 4)})


def _eagle3_inputs(n: int, _draft_layers: int) -> list[int]:
    return [2, n // 2, n - 3]


def _spread(n: int, draft_layers: int) -> list[int]:
    if draft_layers == 1:
        return [n // 2]
    return [round(1 + i * (n - 4) / (draft_layers - 1)) for i in range(draft_layers)]


def _spread_to_the_last(n: int, draft_layers: int) -> list[int]:
    if draft_layers == 1:
        return [n - 1]
    return [round(1 + i * (n - 2) / (draft_layers - 1)) for i in range(draft_layers)]


def _last(n: int, _draft_layers: int) -> list[int]:
    return [n]


_SPREADING = (
    "layer_output", "specforge", "sglang", "sglang_dflash", "dflash", "torchspec", "automodel_dflash", "modelopt", "angelslim",
)  # fmt: skip
_BY_BOUNDARY = ("boundary", "vllm", "speculators")

FORMULAS: dict[tuple[str, str], Formula] = {
    **dict.fromkeys(
        [
            ("eagle3", name)
            for name in ("layer_output", "specforge", "sglang", "torchspec", "automodel_eagle3", "angelslim")
        ],
        _eagle3_outputs,
    ),
    ("eagle3", "modelopt"): _eagle3_clamped,
    **dict.fromkeys([("eagle3", name) for name in (*_BY_BOUNDARY, "eagle")], _eagle3_inputs),
    **dict.fromkeys([("dflash", name) for name in _SPREADING], _spread),
    **dict.fromkeys([("dflash", name) for name in _BY_BOUNDARY], _eagle3_inputs),
    ("dspark", "specforge"): _spread,
    **dict.fromkeys([("dspark", name) for name in ("layer_output", "automodel_dspark")], _spread_to_the_last),
    ("mtp", "speculators"): _last,
}
ALGORITHMS: tuple[str, ...] = tuple(dict.fromkeys(algorithm for algorithm, _ in FORMULAS))


def default_ids(
    system: str, algorithm: str, n: int, *, draft_layers: int = 5, model_types: Collection[str] = ()
) -> tuple[int, ...]:
    """Return the ids that `system` takes for `algorithm` on a target of n decoder layers.

    Args:
        draft_layers: how many layers the drafter has, where the formula asks.
        model_types: ``model_type`` of the target's config and of its text config: SGLang's EAGLE-3 layers depend on it.

    Raises:
        LayerIdError: the system has no default for the algorithm, or it does not fit so few layers.
    """
    formula = FORMULAS.get((algorithm, system_named(system).name))
    if formula is None:
        having = ", ".join(name for known, name in FORMULAS if known == algorithm) or "none"
        raise LayerIdError(
            f"{system} has no default layers for {algorithm!r}; it takes them from the draft config. Systems that have: {having}."
        )
    ids = formula(n, draft_layers)
    try:
        if (algorithm, system) == ("eagle3", "sglang"):
            return ids_of(states_of(None, n, system, model_types), n, system, model_types)
        states_of(ids, n, system, model_types)
    except LayerIdError as unfit:
        raise LayerIdError(
            f"{system} default layers for {algorithm} and {draft_layers} draft layers, {ids}, do not fit {n} decoder layers: "
            f"{unfit}"
        ) from unfit
    return tuple(ids)


def default_layer_ids(algorithm: Algorithm, n: int, *, draft_layers: int = 5) -> tuple[int, ...]:
    """Return the ``layer_output`` ids that `algorithm`'s published training recipes take for a target of n layers.

    Raises:
        LayerIdError: the formula gives no strictly increasing ids for so few layers.
    """
    if algorithm == "eagle3" and n < 7:
        raise LayerIdError(f"EAGLE3 default layers need num_hidden_layers >= 7; got {n}.")
    return default_ids("layer_output", algorithm, n, draft_layers=draft_layers)
