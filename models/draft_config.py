"""The target layers in a drafter's ``config.json``.

What the numbers mean is not in the file: two systems write equal fields with ids that differ by one. The reader gives the ids as
they stand and the field they stood in; the system whose ids they are is named by the caller (see `models.id_systems`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import UsageError
from .id_systems import boundaries_of
from .layer_ids import check_plain_ids

# Field, with the part of the config it stands in, in the order they are told.
FIELDS: tuple[tuple[str, ...], ...] = (
    ("eagle_config", "eagle_aux_hidden_state_layer_ids"),
    ("eagle_aux_hidden_state_layer_ids",),
    ("dflash_config", "target_layer_ids"),
    ("dspark_config", "target_layer_ids"),
    ("dspark_target_layer_ids",),
    ("target_layer_ids",),
    ("aux_hidden_state_layer_ids",),
)


class DraftConfigError(UsageError):
    """A drafter's config that does not tell its target layers."""


@dataclass(frozen=True)
class DraftConfig:
    """What a drafter's config says of its target.

    Attributes:
        field: where the ids stand, such as ``dflash_config.target_layer_ids``.
        layer_ids: as they stand there.
        target_layers: how many decoder layers it says the target has; None where it does not say.
        draft_layers: how many layers the drafter has; None where it does not say.
    """

    field: str
    layer_ids: tuple[int, ...]
    target_layers: int | None
    draft_layers: int | None

    def boundaries(self, n: int, system: str) -> tuple[int, ...]:
        """The boundaries to tap on a target of n decoder layers, the ids being those of `system`.

        Raises:
            DraftConfigError: the drafter is for a target with another number of layers.
            LayerIdError: the ids are not ids of that system.
        """
        if self.target_layers is not None and self.target_layers != n:
            raise DraftConfigError(
                f"the draft config is for a target of {self.target_layers} decoder layers (num_target_layers); this model "
                f"has {n}."
            )
        return boundaries_of(self.layer_ids, n, system)


def read_draft_config(source: str | Path | Mapping[str, Any], *, field: str | None = None) -> DraftConfig:
    """Read the target layers from a drafter's config.

    Args:
        source: a ``config.json``, the folder that holds it, or its content.
        field: which field to take where several hold different ids, such as ``target_layer_ids``.

    Raises:
        DraftConfigError: no such file, no known field, or several fields that hold different ids.
        LayerIdError, LayerIdTypeError: ids that are no strictly increasing plain integers.
    """
    config, where = (source, "the draft config") if isinstance(source, Mapping) else _content(Path(source))
    found = _found(config)
    if field is not None:
        found = {name: ids for name, ids in found.items() if name == field}
    if not found:
        known = ", ".join(".".join(path) for path in FIELDS)
        raise DraftConfigError(f"{where} has no {field or 'field with target layers'}; known are {known}.")
    if len({tuple(ids) if isinstance(ids, list) else ids for ids in found.values()}) > 1:
        told = "; ".join(f"{name} = {ids}" for name, ids in found.items())
        raise DraftConfigError(f"{where} holds different layer ids, so the field has to be named: {told}.")
    name, ids = next(iter(found.items()))
    if name.startswith("eagle_config") and config["eagle_config"].get("use_aux_hidden_state") is False:
        raise DraftConfigError(f"{where} says use_aux_hidden_state = false: this drafter takes no target layers.")
    return DraftConfig(
        field=name,
        layer_ids=check_plain_ids(ids, algorithm=name),
        target_layers=_whole_number(config, "num_target_layers")
        or _whole_number(config, "dflash_config", "num_target_layers"),
        draft_layers=_whole_number(config, "num_hidden_layers")
        or _whole_number(config, "transformer_layer_config", "num_hidden_layers"),
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
    values = {".".join(path): _at(config, path) for path in FIELDS}
    return {name: value for name, value in values.items() if value is not None}


def _at(config: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = config
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _whole_number(config: Mapping[str, Any], *path: str) -> int | None:
    value = _at(config, path)
    return value if type(value) is int and value > 0 else None
