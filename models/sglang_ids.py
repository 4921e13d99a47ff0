"""SGLang's readings of layer ids: by its setter, and for each setter by the target's model type.

SGLang captures what *enters* a layer, so most setters add 1 to an id and none of the common models captures the output of
the last layer. The families below differ; the same list of ids then names other states, and nothing crashes. The rules are
those of SGLang 0.5.23, read 2026-11 (``set_eagle3_layers_to_capture``, ``set_dflash_layers_to_capture``,
``set_dspark_layers_to_capture`` of each model file, and where its forward looks at them).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from .layer_ids import LayerIdError

LastState = Literal["pre-norm", "post-norm", "never"]
Ids = tuple[int, ...]

NEVER_CAPTURED = (
    "SGLang accepts that id and never captures it, for it looks before each layer and no layer follows the last"
)


@dataclass(frozen=True)
class Reading:
    """One way in which a setter reads a list of ids: id + `shift` = boundary; `last` is what the id of boundary n gives."""

    shift: int
    last: LastState
    embeddings: bool = False


OUTPUTS = Reading(1, "never")
OUTPUTS_WITH_LAST = Reading(1, "pre-norm")
STATES = Reading(0, "never", embeddings=True)
STATES_WITH_LAST = Reading(0, "pre-norm", embeddings=True)

# Which reading a setter takes for a list of ids on a target of n layers.
Rule = Callable[[Ids, int], Reading]


def _outputs(_ids: Ids, _n: int) -> Reading:
    return OUTPUTS


def _outputs_with_last(_ids: Ids, _n: int) -> Reading:
    return OUTPUTS_WITH_LAST


def _states(_ids: Ids, _n: int) -> Reading:
    return STATES


def _outputs_if_first_is_one(ids: Ids, _n: int) -> Reading:
    return OUTPUTS if ids[0] == 1 else STATES


def _states_if_last_is_n(ids: Ids, n: int) -> Reading:
    return STATES_WITH_LAST if max(ids) == n else OUTPUTS_WITH_LAST


_DEEPSEEK = (
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm_moe_dsa", "glm4_moe_lite",
)  # fmt: skip
_MINIMAX_M3 = ("minimax_m3", "minimax_m3_vl", "minimax_m3_vl_text")
_LFM2 = ("lfm2", "lfm2_moe", "lfm2_vl")
_GEMMA4 = ("gemma4", "gemma4_text")

_EAGLE3: dict[str, Rule] = {
    **dict.fromkeys(_DEEPSEEK, _outputs_if_first_is_one),
    "gpt_oss": _states_if_last_is_n,
    **dict.fromkeys(("gemma3", "gemma3_text", *_GEMMA4, *_MINIMAX_M3), _outputs_with_last),
}
_DFLASH: dict[str, Rule] = dict.fromkeys(
    (
        "gpt_oss", *_GEMMA4, *_MINIMAX_M3, *_LFM2, "laguna", "mimo_v2", "mimo_v2_flash", "nemotron_h", "nemotron_h_omni",
        "kimi_k3", "beam", "inkling", "inkling_text", "muse_spark", "muse_spark_text",
    ),
    _outputs_with_last,
)  # fmt: skip
_DSPARK: dict[str, Rule] = {
    **_DFLASH,
    **dict.fromkeys(("kimi_linear", "deepseek_v4", "bailing_hybrid"), _outputs_with_last),
    "deepseek_v41": _states,
}
_SETTERS = {"sglang": _EAGLE3, "sglang_dflash": _DFLASH, "sglang_dspark": _DSPARK}
# A DFlash draft of Muse Glimmer is read by its own architecture, which ids alone do not tell.
_BY_DRAFT = frozenset({"muse_glimmer", "muse_glimmer_text"})
# Without ids, the EAGLE-3 setter marks layers 2, n//2, n-3, whose inputs it takes; this family adds 1 there too.
_LATER_DEFAULTS = frozenset(_MINIMAX_M3) - {"minimax_m3"}


def is_sglang(system: str) -> bool:
    """Return whether `system` is one of SGLang's setters, whose ids depend on the target's model type."""
    return system in _SETTERS


def sglang_rules(system: str, model_types: Collection[str]) -> tuple[Rule, ...]:
    """Return the rules by which `system` may read ids: the one of the target's family, or all where no family is given.

    Args:
        system: ``sglang`` (EAGLE-3), ``sglang_dflash`` or ``sglang_dspark``.
        model_types: ``model_type`` of the target's config and of its text config; empty where it is not known.

    Raises:
        LayerIdError: SGLang reads ids for this family by the draft model's architecture.
    """
    if system != "sglang" and _BY_DRAFT.intersection(model_types):
        raise LayerIdError(
            "SGLang reads the ids of a Muse Glimmer draft by the draft's architecture (outputs of layers for "
            "DFlash2DraftModel and MuseGlimmerAssistantModel, else states); name what they are: --ids-of layer_output or "
            "--ids-of boundary."
        )
    families = _SETTERS[system]
    if not model_types:
        return (_outputs, *dict.fromkeys(families.values()))
    return (next((families[name] for name in model_types if name in families), _outputs),)


def sglang_default_boundaries(n: int, model_types: Collection[str]) -> tuple[int, ...]:
    """Return the boundaries that SGLang's EAGLE-3 setter captures on a target of n layers where it is given no ids."""
    later = 1 if _LATER_DEFAULTS.intersection(model_types) else 0
    return (2 + later, n // 2 + later, n - 3 + later)
