"""The target layers in a drafter's ``config.json``.

What the numbers mean is not in the file: it depends on the field they stand in and on the engine that reads it. vLLM, for
one, takes ``eagle_aux_hidden_state_layer_ids`` as states and adds 1 to every ``target_layer_ids``. The caller names the
engine; the reader gives the ids as they stand, their field, and the boundaries that the engine captures for them. An engine
that does not read a field is refused, for it would serve the drafter on other layers. Read 2026-11 in vLLM 0.32, SGLang
0.5.23, SpecForge 0.2.0, speculators 0.9.0, Model-Optimizer 0.47.0 and Automodel 0.7.0.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import UsageError
from .id_systems import boundaries_of, system_named
from .layer_ids import CONVENTIONS, LayerIdError, check_plain_ids

EAGLE_CONFIG = "eagle_config.eagle_aux_hidden_state_layer_ids"
EAGLE = "eagle_aux_hidden_state_layer_ids"
DFLASH = "dflash_config.target_layer_ids"
DSPARK_CONFIG = "dspark_config.target_layer_ids"
DSPARK = "dspark_target_layer_ids"
TARGET = "target_layer_ids"
SPECULATORS = "aux_hidden_state_layer_ids"
# In the order they are told; each may stand in `text_config` instead.
FIELDS: tuple[str, ...] = (EAGLE_CONFIG, EAGLE, DFLASH, DSPARK_CONFIG, DSPARK, TARGET, SPECULATORS)
TEXT_CONFIG = "text_config"

# The system whose ids an engine takes a field's for. An engine that is not here reads the fields of layer outputs as its own ids.
READINGS: Mapping[str, Mapping[str, str]] = {
    "vllm": {EAGLE: "vllm", SPECULATORS: "vllm", **dict.fromkeys((DFLASH, DSPARK, TARGET), "layer_output")},
    "speculators": {EAGLE: "speculators", SPECULATORS: "speculators", DFLASH: "layer_output"},
    "sglang": {EAGLE_CONFIG: "sglang", DFLASH: "sglang_dflash", TARGET: "sglang_dflash", DSPARK: "sglang_dspark"},
    "sglang_dflash": dict.fromkeys((DFLASH, TARGET), "sglang_dflash"),
    "sglang_dspark": dict.fromkeys((DFLASH, DSPARK, TARGET), "sglang_dspark"),
    "eagle": {EAGLE: "eagle", EAGLE_CONFIG: "eagle"},
}
OUTPUT_FIELDS = (EAGLE_CONFIG, DFLASH, DSPARK_CONFIG, DSPARK, TARGET)


class DraftConfigError(UsageError):
    """A drafter's config that does not tell its target layers."""


@dataclass(frozen=True)
class DraftConfig:
    """Layer ids of the target in a draft model's config.

    Attributes:
        field: where the ids stand, such as ``dflash_config.target_layer_ids``.
        layer_ids: as they stand there.
        target_layers: how many decoder layers it says the target has; None where it does not say.
        draft_layers: how many layers the drafter has; None where it does not say.
        model_type: the drafter's own; None where it does not say.
    """

    field: str
    layer_ids: tuple[int, ...]
    target_layers: int | None
    draft_layers: int | None
    model_type: str | None = None

    def boundaries(self, n: int, system: str, model_types: Collection[str] = ()) -> tuple[int, ...]:
        """Return the boundaries that `system` captures for this drafter on a target of n decoder layers.

        Args:
            system: the engine or trainer that reads the config; ``layer_output`` or ``boundary`` take the ids at the
            caller's word.
            model_types: ``model_type`` of the target's config and of its text config, where the target is known.

        Raises:
            DraftConfigError: the drafter is for a target with another number of layers, or the system does not read the field.
            LayerIdError: the ids are not ids of that system.

        Example:
            >>> read_draft_config({"dflash_config": {"target_layer_ids": [1, 9]}}).boundaries(36, "vllm")
            (2, 10)
        """
        if self.target_layers is not None and self.target_layers != n:
            raise DraftConfigError(
                f"the draft config is for a target of {self.target_layers} decoder layers (num_target_layers); this model "
                f"has {n}."
            )
        if system == "vllm" and self._is(EAGLE_CONFIG):
            return self._in_both_runners_of_vllm(n)
        return boundaries_of(self.layer_ids, n, self._read_as(system), model_types)

    def _is(self, field: str) -> bool:
        return self.field.removeprefix(f"{TEXT_CONFIG}.") == field

    def _read_as(self, system: str) -> str:
        """Return the system whose ids the field holds when `system` reads it."""
        if system_named(system).name in CONVENTIONS:
            return system
        if system == "vllm" and self._is(DSPARK) and self.model_type == "deepseek_v41":
            return "vllm"
        readings = READINGS.get(system, dict.fromkeys(OUTPUT_FIELDS, system))
        field = self.field.removeprefix(f"{TEXT_CONFIG}.")
        if field not in readings:
            raise DraftConfigError(
                f"{system} does not read {self.field}, in which this draft config holds {list(self.layer_ids)}; it reads "
                f"{', '.join(readings)}. Name who does, or what the ids are: layer_output (outputs of layers) or boundary "
                f"(states after k layers); or, for the layers {system} takes where a config has none, --algorithm."
            )
        return readings[field]

    def _in_both_runners_of_vllm(self, n: int) -> tuple[int, ...]:
        """Return what vLLM captures if its two model runners agree: one reads the field, the other only its default."""
        default = (2, n // 2, n - 3)
        if self.layer_ids != default:
            raise LayerIdError(
                f"vLLM's model runners read {self.field} differently: V1 captures {list(self.layer_ids)}, V2 does not read it "
                f"and captures its default {list(default)} (vLLM 0.32). Name what the ids are: layer_output (outputs of "
                "layers) or boundary (states after k layers); or write them into eagle_aux_hidden_state_layer_ids, as "
                "states, which both read."
            )
        return boundaries_of(self.layer_ids, n, "vllm")


def read_draft_config(source: str | Path | Mapping[str, Any], *, field: str | None = None) -> DraftConfig:
    """Read the target layers from a drafter's config.

    Args:
        source: a ``config.json``, the folder that holds it, or its content.
        field: which field to take where several hold different ids, such as ``target_layer_ids``.

    Raises:
        DraftConfigError: no such file, no known field, or several fields that hold different ids.
        LayerIdError, LayerIdTypeError: ids that are no strictly increasing plain integers.

    Example:
        >>> read_draft_config({"dflash_config": {"target_layer_ids": [1, 9]}}).field
        'dflash_config.target_layer_ids'
    """
    config, where = (source, "the draft config") if isinstance(source, Mapping) else _content(Path(source))
    found = _found(config)
    if field is not None:
        found = {name: ids for name, ids in found.items() if name == field}
    if not found:
        raise DraftConfigError(
            f"{where} has no {field or 'field with target layers'}; known are {', '.join(FIELDS)}, also in {TEXT_CONFIG}. "
            "For the layers that an engine takes where a config names none, give its algorithm instead (--algorithm eagle3 "
            "--ids-of vllm)."
        )
    first, *others = found.values()
    if any(ids != first for ids in others):
        values = "; ".join(f"{name} = {ids}" for name, ids in found.items())
        raise DraftConfigError(
            f"{where} holds different layer ids, so the field has to be named: {values}. Name it (field=), or give the ids "
            "themselves with what they are (--layer-ids with --ids-of)."
        )
    name, ids = next(iter(found.items()))
    section = _at(config, name.rpartition(".")[0])
    if EAGLE_CONFIG in name and section.get("use_aux_hidden_state") is False:
        raise DraftConfigError(f"{where} says use_aux_hidden_state = false: this drafter takes no target layers.")
    return DraftConfig(
        field=name,
        layer_ids=check_plain_ids(ids, algorithm=name),
        target_layers=_whole_number(config, "num_target_layers")
        or _whole_number(config, "dflash_config.num_target_layers"),
        draft_layers=_whole_number(config, "num_hidden_layers")
        or _whole_number(config, "transformer_layer_config.num_hidden_layers"),
        model_type=str(config["model_type"]) if config.get("model_type") is not None else None,
    )


def _content(path: Path) -> tuple[Mapping[str, Any], str]:
    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DraftConfigError(f"cannot read the draft config {file}: {error.strerror or error}.") from error
    except ValueError as error:
        raise DraftConfigError(f"{file} is no JSON: {error}.") from error
    if not isinstance(content, dict):
        raise DraftConfigError(f"{file} holds a {type(content).__name__}; expected an object of config fields.")
    return content, str(file)


def _found(config: Mapping[str, Any]) -> dict[str, Any]:
    names = (*FIELDS, *(f"{TEXT_CONFIG}.{name}" for name in FIELDS))
    values = {name: _at(config, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _at(config: Mapping[str, Any], name: str) -> Any:
    value: Any = config
    for part in name.split(".") if name else ():
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _whole_number(config: Mapping[str, Any], name: str) -> int | None:
    value = _at(config, name)
    return value if type(value) is int and value > 0 else None
