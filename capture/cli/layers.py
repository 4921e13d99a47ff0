"""`hiddentap layers`: where a model's layers are, what ids mean in each system, and which ones the algorithms take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .json_values import show_json
from .options import json_option, layer_ids

if TYPE_CHECKING:
    from torch import nn

    from ...models.decoder import Decoder
    from ...models.layer_ids import Algorithm


@click.command()
@click.argument("model", metavar="M")
@click.option("--revision", metavar="R", help="Branch, tag or commit of a hub model.")
@click.option("--trust-remote-code", is_flag=True, help="Let code that comes with the model run.")
@click.option("--adapter", metavar="NAME", help="How to read the residual stream where it is not plain.")
@click.option("--layer-ids", "ids", metavar="I,J,...", help="Say these ids in each system's terms.")
@click.option(
    "--ids-of", default="layer_output", show_default=True, metavar="SYSTEM", help="Whose ids --layer-ids are."
)
@json_option
def layers(
    model: str,
    revision: str | None,
    trust_remote_code: bool,
    adapter: str | None,
    ids: str | None,
    ids_of: str,
    as_json: bool,
) -> int:
    """Say where the decoder layers of M are, how many, and the default ids of each algorithm in each system's terms.

    Reads the config alone, no weights.
    """
    from ...models.decoder import find_decoder
    from ...models.loading import ModelSource, model_skeleton
    from .quiet_libraries import quiet_libraries

    quiet_libraries()
    skeleton = model_skeleton(ModelSource(model, revision, trust_remote_code=trust_remote_code))
    decoder = find_decoder(skeleton, adapter=adapter)
    if as_json:
        show_json(_values(skeleton, decoder) | {"same_as": _same_as(layer_ids(ids), decoder.n, ids_of)})
        return 0
    _show(skeleton, decoder)
    if ids is not None:
        click.echo("\n" + _conversions(layer_ids(ids), decoder.n, ids_of))
    return 0


def _values(skeleton: nn.Module, decoder: Decoder) -> dict[str, Any]:
    from ...models.id_systems import SYSTEMS
    from ...models.kimi import kimi_generation
    from ...models.layer_ids import CONVENTIONS

    n, kimi = decoder.n, kimi_generation(skeleton.config, decoder.layers)
    systems = {name: system for name, system in SYSTEMS.items() if name not in CONVENTIONS}
    return {
        "model": type(skeleton).__name__,
        "n": n,
        "layer_class": type(decoder.layers[0]).__name__,
        "layers_path": decoder.layers_path,
        "found_by": decoder.found_by,
        "hidden_sizes": sorted(decoder.widths),
        "adapter": decoder.adapter_name,
        "generation": None if kimi is None else {"name": kimi.name, "adapters": kimi.adapters},
        "default_ids": {algorithm: _defaults(algorithm, n) for algorithm in ("eagle3", "dflash", "dspark")},
        "systems": {
            name: {
                "lowest": system.lowest(),
                "highest": system.highest(n),
                "meaning": system.about,
                **{algorithm: _defaults_in(name, algorithm, n) for algorithm in ("eagle3", "dflash")},
            }
            for name, system in systems.items()
        },
    }


def _show(skeleton: nn.Module, decoder: Decoder) -> None:
    from .tables import table

    n = decoder.n
    rows = [
        ("model", type(skeleton).__name__),
        ("layers", f"{n} x {type(decoder.layers[0]).__name__} at {decoder.layers_path} (found by {decoder.found_by})"),
        ("H", " or ".join(map(str, sorted(decoder.widths)))),
        ("layer_output ids", f"0..{n - 1}: id k is the output of 0-based layer k"),
        ("boundary ids", f"0..{n}: id k is the state after k layers; 0 the embeddings, {n} before the final norm"),
    ]
    if decoder.adapter_name is not None:
        rows.insert(2, ("adapter", decoder.adapter_name))
    rows[1:1] = _kimi_rows(skeleton, decoder)
    click.echo(table(rows))
    click.echo("\n" + _default_table(n) + "\n\n" + _system_table(n))


def _kimi_rows(model: Any, decoder: Any) -> list[tuple[str, str]]:
    """Which generation of Kimi the model is, and the readings it leaves to choose from; no row for other models."""
    from ...models.kimi import kimi_generation

    generation = kimi_generation(model.config, decoder.layers)
    if generation is None:
        return []
    readings = " or ".join(f"--adapter {name}" for name in generation.adapters)
    return [("generation", f"{generation.name}, read plainly" if not readings else f"{generation.name}: {readings}")]


def _same_as(ids: Any, n: int, of: str) -> dict[str, tuple[int, ...] | None] | None:
    """The states that `ids` of one system name, in the ids of every system; None where one cannot name them, or nobody asked."""
    from ...models.id_systems import SYSTEMS, convert_layer_ids, states_of
    from ...models.layer_ids import LayerIdError

    if ids is None:
        return None
    states_of(ids, n, of)  # says what is wrong with the ids themselves
    found: dict[str, tuple[int, ...] | None] = {}
    for name in SYSTEMS:
        try:
            found[name] = convert_layer_ids(ids, n, of=of, to=name)
        except LayerIdError:
            found[name] = None
    return found


def _conversions(ids: Any, n: int, of: str) -> str:
    """The states that `ids` of one system name, in the ids of every system; why not, where one cannot name them."""
    from ...models.id_systems import SYSTEMS, convert_layer_ids, states_of
    from ...models.layer_ids import LayerIdError

    states = states_of(ids, n, of)
    lines = [f"{'the same as':<18}({of} {_listed(ids)}: {', '.join(map(str, states))})"]
    for name in SYSTEMS:
        try:
            lines.append(f"{name:<18}{_listed(convert_layer_ids(ids, n, of=of, to=name))}")
        except LayerIdError as unfit:
            lines.append(f"{name:<18}- {unfit}")
    return "\n".join(lines)


def _default_table(n: int) -> str:
    from ...models.default_ids import default_layer_ids
    from ...models.layer_ids import to_boundaries

    algorithms: tuple[Algorithm, ...] = ("eagle3", "dflash", "dspark")
    lines = [f"{'default ids':<17}{'layer_output':<24}boundary"]
    for algorithm in algorithms:
        try:
            ids = default_layer_ids(algorithm, n)
        except ValueError as unfit:
            lines.append(f"{algorithm:<17}{unfit}")
            continue
        lines.append(f"{algorithm:<17}{_listed(ids):<24}{_listed(to_boundaries(ids, n, 'layer_output'))}")
    return "\n".join(lines)


def _system_table(n: int) -> str:
    """The systems whose ids `capture --ids-of` takes: their range here, their default for EAGLE-3, and what an id means."""
    from ...models.id_systems import SYSTEMS
    from ...models.layer_ids import CONVENTIONS

    lines = [f"{'ids of':<18}{'range':<10}{'eagle3':<14}{'dflash':<18}an id means"]
    for name, system in SYSTEMS.items():
        if name in CONVENTIONS:
            continue
        eagle3, dflash = (_listed(_defaults_in(name, algorithm, n) or ()) or "-" for algorithm in ("eagle3", "dflash"))
        span = f"{system.lowest()}..{system.highest(n)}"
        lines.append(f"{name:<18}{span:<10}{eagle3:<14}{dflash:<18}{system.about}")
    return "\n".join(lines)


def _defaults(algorithm: Algorithm, n: int) -> dict[str, tuple[int, ...]] | None:
    """The default ids in both conventions; None where the model has too few layers for them."""
    from ...models.default_ids import default_layer_ids
    from ...models.layer_ids import to_boundaries

    try:
        ids = default_layer_ids(algorithm, n)
    except ValueError:
        return None
    return {"layer_output": ids, "boundary": to_boundaries(ids, n, "layer_output")}


def _defaults_in(system: str, algorithm: Algorithm, n: int) -> tuple[int, ...] | None:
    """The default ids in a system's own words; None where it has none for a model of n layers."""
    from ...models.default_ids import FORMULAS, default_ids

    if (algorithm, system) not in FORMULAS:
        return None
    try:
        return default_ids(system, algorithm, n)
    except ValueError:
        return None


def _listed(ids: tuple[int, ...]) -> str:
    return ",".join(map(str, ids))
