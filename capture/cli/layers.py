"""`hiddentap layers`: where a model's layers are, and what layer ids mean in each system."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .options import json_option, layer_ids
from .output import show_json

if TYPE_CHECKING:
    from torch import nn

    from ...models.decoder import Decoder
    from ...models.layer_ids import Algorithm
    from ...models.published_form import PublishedForm
    from ...models.streaming import StreamedNeeds


@click.command()
@click.argument("model", metavar="M")
@click.option("--revision", metavar="R", help="Branch, tag or commit of a hub model.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model.")
@click.option("--adapter", metavar="NAME", help="How to read the hidden state if a layer has several candidates.")
@click.option("--layer-ids", "ids", metavar="I,J,...", help="Convert these ids to each system's.")
@click.option(
    "--ids-of",
    default="layer_output",
    show_default=True,
    metavar="SYSTEM",
    help="Engine or trainer whose ids --layer-ids are.",
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
    """Print the decoder layers of M, and each algorithm's default layer ids as every engine and trainer counts them.

    Reads the config and the headers of local weight files, no weights.
    """
    from ...models.config import model_types
    from ...models.decoder import find_decoder
    from ...models.loading import local_form, model_skeleton
    from ...models.model_source import ModelSource
    from .output import quiet_libraries

    quiet_libraries()
    source = ModelSource(model, revision, trust_remote_code=trust_remote_code)
    skeleton, form = model_skeleton(source), local_form(source)
    decoder, types = find_decoder(skeleton, adapter=adapter), model_types(skeleton.config)
    needs = None if form is None else _needs(decoder, form)
    if as_json:
        told = {
            "form": str(form) if form else None,
            "bytes_on_disk": form.bytes_on_disk if form else None,
            "streamed": needs and {
                "memory": needs.memory, "layer": needs.layer, "outside": needs.outside, "read": sum(needs.layers_on_disk)
            },
        }  # fmt: skip
        show_json(_values(skeleton, decoder) | told | {"same_as": _same_as(layer_ids(ids), decoder.n, ids_of, types)})
        return 0
    _show(skeleton, decoder, form, needs)
    if ids is not None:
        click.echo("\n" + _conversions(layer_ids(ids), decoder.n, ids_of, types))
    return 0


def _values(skeleton: nn.Module, decoder: Decoder) -> dict[str, Any]:
    from ...models.config import model_types
    from ...models.id_systems import SYSTEMS
    from ...models.kimi import kimi_generation
    from ...models.layer_ids import CONVENTIONS

    types = model_types(skeleton.config)
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
                **{algorithm: _defaults_in(name, algorithm, n, types) for algorithm in ("eagle3", "dflash")},
            }
            for name, system in systems.items()
        },
    }


def _needs(decoder: Decoder, form: PublishedForm) -> StreamedNeeds:
    """Return the needs of streamed weights that compute in the config's dtype."""
    import torch

    from ...models.streaming import StreamedNeeds

    stated = getattr(getattr(decoder.model, "config", None), "dtype", None) or torch.float32
    return StreamedNeeds.of_skeleton(decoder, form.tensors.values(), stated.itemsize)


def _show(skeleton: nn.Module, decoder: Decoder, form: PublishedForm | None, needs: StreamedNeeds | None) -> None:
    from ...models.config import model_types
    from .output import size, table

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
    if form is not None:
        rows.insert(1, ("form", f"{form}; {form.bytes_on_disk:,} bytes on disk"))
    if needs is not None:
        read = f"reads up to {size(sum(needs.layers_on_disk))} for each block of batches"
        held = f"two layers of {size(needs.layer)} and {size(needs.outside)} outside the layers"
        rows.insert(2, ("--stream-weights", f"{read}; holds {size(needs.memory)} ({held}) and the states of a block"))
    rows[1:1] = _kimi_rows(skeleton, decoder)
    click.echo(table(rows))
    click.echo("\n" + _default_table(n) + "\n\n" + _system_table(n, model_types(skeleton.config)))


def _kimi_rows(model: Any, decoder: Any) -> list[tuple[str, str]]:
    """Return rows with the model's Kimi generation and its possible readings; none for other models."""
    from ...models.kimi import kimi_generation

    generation = kimi_generation(model.config, decoder.layers)
    if generation is None:
        return []
    readings = " or ".join(f"--adapter {name}" for name in generation.adapters)
    return [("generation", f"{generation.name}, read plainly" if not readings else f"{generation.name}: {readings}")]


def _same_as(ids: Any, n: int, of: str, types: tuple[str, ...]) -> dict[str, tuple[int, ...] | None] | None:
    """Return `ids` of one system in the ids of every system; None for a system that cannot name them, or without ids."""
    from ...models.id_systems import SYSTEMS, convert_layer_ids, states_of
    from ...models.layer_ids import LayerIdError

    if ids is None:
        return None
    states_of(ids, n, of, types)  # says what is wrong with the ids themselves
    found: dict[str, tuple[int, ...] | None] = {}
    for name in SYSTEMS:
        try:
            found[name] = convert_layer_ids(ids, n, of=of, to=name, model_types=types)
        except LayerIdError:
            found[name] = None
    return found


def _conversions(ids: Any, n: int, of: str, types: tuple[str, ...]) -> str:
    """Return `ids` of one system in the ids of every system; for one that cannot name them, the reason."""
    from ...models.id_systems import SYSTEMS, convert_layer_ids, states_of
    from ...models.layer_ids import LayerIdError

    states = states_of(ids, n, of, types)
    lines = [f"{'the same as':<18}({of} {_listed(ids)}: {', '.join(map(str, states))})"]
    for name in SYSTEMS:
        try:
            lines.append(f"{name:<18}{_listed(convert_layer_ids(ids, n, of=of, to=name, model_types=types))}")
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


def _system_table(n: int, types: tuple[str, ...]) -> str:
    """Return a table of the systems of `--ids-of`: range of ids, EAGLE-3 defaults, meaning of an id."""
    from ...models.id_systems import SYSTEMS
    from ...models.layer_ids import CONVENTIONS

    lines = [f"{'ids of':<18}{'range':<10}{'eagle3':<14}{'dflash':<18}an id means"]
    for name, system in SYSTEMS.items():
        if name in CONVENTIONS:
            continue
        eagle3, dflash = (
            _listed(_defaults_in(name, algorithm, n, types) or ()) or "-" for algorithm in ("eagle3", "dflash")
        )
        span = f"{system.lowest()}..{system.highest(n)}"
        lines.append(f"{name:<18}{span:<10}{eagle3:<14}{dflash:<18}{system.about}")
    return "\n".join(lines)


def _defaults(algorithm: Algorithm, n: int) -> dict[str, tuple[int, ...]] | None:
    """Return the default ids in both conventions; None for a model with too few layers."""
    from ...models.default_ids import default_layer_ids
    from ...models.layer_ids import to_boundaries

    try:
        ids = default_layer_ids(algorithm, n)
    except ValueError:
        return None
    return {"layer_output": ids, "boundary": to_boundaries(ids, n, "layer_output")}


def _defaults_in(system: str, algorithm: str, n: int, types: tuple[str, ...]) -> tuple[int, ...] | None:
    """Return a system's own default ids; None if it has none for n layers."""
    from ...models.default_ids import FORMULAS, default_ids

    if (algorithm, system) not in FORMULAS:
        return None
    try:
        return default_ids(system, algorithm, n, model_types=types)
    except ValueError:
        return None


def _listed(ids: tuple[int, ...]) -> str:
    return ",".join(map(str, ids))
