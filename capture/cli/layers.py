"""`hiddentap layers`: where a model's layers are, and which ids the algorithms take."""

from __future__ import annotations

from typing import Any

import click


@click.command()
@click.argument("model", metavar="M")
@click.option("--revision", metavar="R", help="Branch, tag or commit of a hub model.")
@click.option("--trust-remote-code", is_flag=True, help="Let code that comes with the model run.")
def layers(model: str, revision: str | None, trust_remote_code: bool) -> int:
    """Say where the decoder layers of M are, how many, and the default ids of each algorithm. Reads no weights."""
    from ...models.decoder import find_decoder
    from ...models.loading import ModelSource, model_skeleton
    from .quiet_libraries import quiet_libraries
    from .tables import table

    quiet_libraries()
    skeleton = model_skeleton(ModelSource(model, revision, trust_remote_code=trust_remote_code))
    decoder = find_decoder(skeleton)
    click.echo(
        table(
            [
                ("model", type(skeleton).__name__),
                ("layers", f"{decoder.n} x {type(decoder.layers[0]).__name__} at {decoder.layers_path}"),
                ("H", " or ".join(map(str, sorted(decoder.widths)))),
                ("layer_output ids", f"0..{decoder.n - 1}: id k is the output of 0-based layer k"),
                (
                    "boundary ids",
                    f"0..{decoder.n}: id k is the state after k layers; 0 the embeddings, {decoder.n} before the final norm",
                ),
            ]
        )
    )
    click.echo("\ndefault ids      layer_output            boundary")
    for algorithm in ("eagle3", "dflash", "dspark"):
        click.echo(f"{algorithm:<17}" + _defaults(algorithm, decoder.n))
    return 0


def _defaults(algorithm: Any, n: int) -> str:
    from ...models.errors import UsageError
    from ...models.layer_ids import default_layer_ids, to_boundaries

    try:
        ids = default_layer_ids(algorithm, n)
    except UsageError as error:
        return str(error)
    as_text = [",".join(map(str, values)) for values in (ids, to_boundaries(ids, n, "layer_output"))]
    return f"{as_text[0]:<24}{as_text[1]}"
