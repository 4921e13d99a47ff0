"""Meaning of layer ids in each drafting system and engine, and conversions between them: lossless, or refused.

The same numbers name different states: vLLM's id k is the state after k layers, SpecForge's the output of 0-based layer k, and
the last one may be taken before the final norm or after it. Such differences never crash; a drafter only becomes worse. So
a system is always named by the caller and never guessed from the numbers. Some engines read the same ids differently for
different models (`models.sglang_ids`): the model's type then decides, and ids that its families read differently are refused
where the model is not known.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from .layer_ids import LayerIdError, check_plain_ids
from .sglang_ids import NEVER_CAPTURED, LastState, Reading, is_sglang, sglang_default_boundaries, sglang_rules


@dataclass(frozen=True, order=True)
class TappedState:
    """One state of the residual stream: boundary 0..n; `normed` only where it is boundary n after the final norm."""

    boundary: int
    normed: bool = False

    def __str__(self) -> str:
        return f"boundary {self.boundary}{' after the final norm' if self.normed else ''}"


@dataclass(frozen=True)
class IdSystem:
    """The ids of one system.

    Attributes:
        about: what an id means, for tables and messages.
        shift: id + shift = boundary.
        embeddings: whether an id names boundary 0.
        last: which state the id of boundary n gives, or that it gives none.
        last_reason: why it gives none.
        default_ids_are_inputs: whether leaving out the ids gives other layers than the same ids would (SGLang).
    """

    name: str
    about: str
    shift: int
    embeddings: bool
    last: LastState
    last_reason: str = ""
    default_ids_are_inputs: bool = False

    def lowest(self) -> int:
        return (0 if self.embeddings else 1) - self.shift

    def highest(self, n: int) -> int:
        return n - self.shift


_OUTPUT, _STATE = "id k is the output of 0-based layer k", "id k is the state after k layers"

SYSTEMS: dict[str, IdSystem] = {
    system.name: system
    for system in (
        IdSystem("layer_output", _OUTPUT, 1, False, "pre-norm"),
        IdSystem("boundary", f"{_STATE}, 0 the embeddings", 0, True, "pre-norm"),
        IdSystem("specforge", f"{_OUTPUT}; SGLang adds 1", 1, False, "never", NEVER_CAPTURED),
        IdSystem(
            "sglang",
            f"EAGLE-3: {_OUTPUT}, by model type a state; without any, what enters layers 2, n//2, n-3",
            1,
            False,
            "never",
            NEVER_CAPTURED,
            default_ids_are_inputs=True,
        ),
        IdSystem("sglang_dflash", f"DFlash: {_OUTPUT}", 1, False, "never", NEVER_CAPTURED),
        IdSystem("sglang_dspark", f"DSpark: {_OUTPUT} (Kimi K3: the mixture)", 1, False, "never", NEVER_CAPTURED),
        IdSystem("vllm", f"{_STATE}, 0 the embeddings", 0, True, "pre-norm"),
        IdSystem("speculators", f"{_STATE}, 0 the embeddings; n is appended", 0, True, "pre-norm"),
        IdSystem("eagle", "id k is what enters 0-based layer k", 0, True, "never", "nothing enters a layer n"),
        IdSystem(
            "deepspec",
            f"{_OUTPUT}, -1 the embeddings",
            1,
            True,
            "never",
            "DeepSpec stores it before the final norm and evaluates after it, and forbids it for that reason",
        ),
        IdSystem("torchspec", _OUTPUT, 1, False, "pre-norm"),
        IdSystem("automodel_eagle3", _OUTPUT, 1, False, "pre-norm"),
        IdSystem("automodel_dflash", _OUTPUT, 1, False, "pre-norm"),
        IdSystem("automodel_dspark", f"{_OUTPUT}, -1 the embeddings, n-1 after the final norm", 1, True, "post-norm"),
        IdSystem("automodel_vllm", _OUTPUT, 1, False, "never", "Automodel's vLLM runner refuses it"),
        IdSystem("modelopt", f"{_OUTPUT}, n-1 after the final norm", 1, False, "post-norm"),
        IdSystem("angelslim", f"{_OUTPUT}, n-1 after the final norm", 1, False, "post-norm"),
        IdSystem("angelslim_vllm", _OUTPUT, 1, False, "pre-norm"),
        IdSystem("dflash", f"{_OUTPUT}, n-1 after the final norm", 1, False, "post-norm"),
        IdSystem("transformers", f"{_OUTPUT} (target_layer_ids), n-1 after the final norm", 1, False, "post-norm"),
    )
}


def system_named(name: str) -> IdSystem:
    """Return the system called `name`.

    Raises:
        LayerIdError: there is none.
    """
    system = SYSTEMS.get(name)
    if system is None:
        raise LayerIdError(f"unknown system of layer ids {name!r}; expected one of {', '.join(SYSTEMS)}.")
    return system


def states_of(
    layer_ids: Sequence[int] | None, n: int, system: str, model_types: Collection[str] = ()
) -> tuple[TappedState, ...]:
    """Return the states that `layer_ids` name under `system`, for a model of n decoder layers.

    Args:
        layer_ids: unique and strictly increasing; None where the system has a default of its own meaning (``sglang``).
        model_types: ``model_type`` of the model's config and of its text config, where the model is known.

    Raises:
        LayerIdError, LayerIdTypeError: not such ids, outside the system's range, one that gives no state there, or ids that the
            system reads differently by model type while `model_types` is empty.

    Example:
        >>> [state.boundary for state in states_of([2, 30, 58], 61, "sglang", ["kimi_k2"])]
        [2, 30, 58]
    """
    named = system_named(system)
    if layer_ids is None and named.default_ids_are_inputs:
        return tuple(TappedState(b) for b in _increasing(sglang_default_boundaries(n, model_types), n, named))
    ids = check_plain_ids(layer_ids, algorithm=system)
    if is_sglang(system):
        return _states_in_sglang(ids, n, named, model_types)
    return _states(ids, n, named)


def ids_of(states: Sequence[TappedState], n: int, system: str, model_types: Collection[str] = ()) -> tuple[int, ...]:
    """Return the ids of `states` under `system`; the inverse of `states_of`.

    Raises:
        LayerIdError: a state that no id of the system names, or ids that it would read differently by model type.
    """
    named = system_named(system)
    if not is_sglang(system):
        return tuple(_id(state, n, named) for state in states)
    unfit: LayerIdError | None = None
    for reading in dict.fromkeys(
        rule(ids, n) for ids in _candidates(states) for rule in sglang_rules(system, model_types)
    ):
        try:
            ids = tuple(_id(state, n, _as_read(named, reading)) for state in states)
            if states_of(ids, n, system, model_types) == tuple(states):
                return ids
        except LayerIdError as error:
            unfit = unfit or error
    raise unfit or LayerIdError(
        f"{system} has no ids for {', '.join(map(str, states))} on a model of type {', '.join(model_types) or 'unknown'}."
    )


def convert_layer_ids(
    layer_ids: Sequence[int] | None, n: int, *, of: str, to: str, model_types: Collection[str] = ()
) -> tuple[int, ...]:
    """Return the ids by which system `to` names the states that `layer_ids` name under system `of`.

    Raises:
        LayerIdError, LayerIdTypeError: no such ids, or a state that `to` cannot name; the message says which and why.

    Example:
        >>> convert_layer_ids([1, 17, 32], 36, of="specforge", to="vllm")
        (2, 18, 33)
    """
    return ids_of(states_of(layer_ids, n, of, model_types), n, to, model_types)


def boundaries_of(
    layer_ids: Sequence[int] | None, n: int, system: str, model_types: Collection[str] = ()
) -> tuple[int, ...]:
    """Return the boundaries that `layer_ids` name under `system`, to be tapped.

    Raises:
        LayerIdError, LayerIdTypeError: as `states_of`; or one of them is a state after the final norm.
    """
    states = states_of(layer_ids, n, system, model_types)
    if any(state.normed for state in states):
        raise LayerIdError(
            f"{system} id {system_named(system).highest(n)} is the state after the final norm, which is no boundary: leave it "
            "out of the ids and take it as post-norm."
        )
    return tuple(state.boundary for state in states)


def _states(ids: tuple[int, ...], n: int, named: IdSystem) -> tuple[TappedState, ...]:
    invalid = [i for i in ids if not named.lowest() <= i <= named.highest(n)]
    if invalid:
        raise LayerIdError(
            f"{named.name} ids {invalid} are outside {named.lowest()}..{named.highest(n)} for {n} decoder layers ({named.about})."
        )
    return tuple(_state(i, n, named) for i in ids)


def _states_in_sglang(
    ids: tuple[int, ...], n: int, named: IdSystem, model_types: Collection[str]
) -> tuple[TappedState, ...]:
    readings = dict.fromkeys(rule(ids, n) for rule in sglang_rules(named.name, model_types))
    found: dict[tuple[TappedState, ...], Reading] = {}
    unfit: LayerIdError | None = None
    for reading in readings:
        try:
            found.setdefault(_states(ids, n, _as_read(named, reading)), reading)
        except LayerIdError as error:
            unfit = unfit or error
    if len(found) == 1 and unfit is None:
        return next(iter(found))
    if not found and unfit is not None:
        raise unfit
    meanings = " or ".join(f"({', '.join(map(str, states))})" for states in found)
    raise LayerIdError(
        f"{named.name} ids {list(ids)} depend on the model: SGLang reads them as "
        f"{meanings}{' or captures none' if unfit else ''}. Name the model's type, or what the ids are: layer_output (outputs of "
        "layers) or boundary (states after k layers)."
    )


def _as_read(named: IdSystem, reading: Reading) -> IdSystem:
    return replace(named, shift=reading.shift, embeddings=reading.embeddings, last=reading.last)


def _candidates(states: Sequence[TappedState]) -> tuple[tuple[int, ...], ...]:
    """Return the two lists of ids that may name `states`: as outputs of layers, and as states."""
    return tuple(tuple(state.boundary - shift for state in states) for shift in (1, 0))


def _state(layer_id: int, n: int, system: IdSystem) -> TappedState:
    boundary = layer_id + system.shift
    if boundary == n and system.last == "never":
        raise LayerIdError(f"{system.name} id {layer_id} of {n} decoder layers gives no state: {system.last_reason}.")
    return TappedState(boundary, normed=boundary == n and system.last == "post-norm")


def _id(state: TappedState, n: int, system: IdSystem) -> int:
    layer_id = state.boundary - system.shift
    if state.boundary == 0 and not system.embeddings:
        raise LayerIdError(f"{system.name} has no id for the embeddings (boundary 0).")
    if not 0 <= state.boundary <= n:
        raise LayerIdError(f"boundary {state.boundary} is outside 0..{n}.")
    if state.boundary < n:
        return layer_id
    if system.last == "never":
        raise LayerIdError(f"{system.name} has no id that gives {state}: {system.last_reason}.")
    if state.normed != (system.last == "post-norm"):
        raise LayerIdError(f"{system.name} id {layer_id} gives boundary {n} {_side(system.last)}, not {state}.")
    return layer_id


def _side(last: LastState) -> str:
    return "after the final norm" if last == "post-norm" else "before the final norm"


def _increasing(boundaries: tuple[int, ...], n: int, system: IdSystem) -> tuple[int, ...]:
    if any(b <= a for a, b in itertools.pairwise(boundaries)):
        raise LayerIdError(f"{system.name} default layers {list(boundaries)} do not fit {n} decoder layers.")
    return boundaries
