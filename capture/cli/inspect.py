"""`hiddentap inspect`: what a folder or one shard holds, from its own headers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...models.errors import UsageError

if TYPE_CHECKING:
    from ..store import Shard


@click.command()
@click.argument("path", type=click.Path(path_type=Path), metavar="OUT")
@click.option(
    "--sample", "sample_id", metavar="ID", help="Show this sample: its text, its tokens with loss mask and norms."
)
@click.option("--tokenizer", metavar="M", help="Tokenizer to show text with.  [default: the one of the captured model]")
@click.option("--json", "as_json", is_flag=True, help="The shard's whole metadata as JSON.")
def inspect(path: Path, sample_id: str | None, tokenizer: str | None, as_json: bool) -> int:
    """Say what the folder or the shard OUT holds."""
    if sample_id is not None:
        _show_sample(path, sample_id, tokenizer)
        return 0
    shards = _shards(path)
    if as_json:
        click.echo(json.dumps(shards[0].metadata, indent=1, sort_keys=True, ensure_ascii=False))
        return 0
    _show(path, shards)
    return 0


def _shards(path: Path) -> list[Shard]:
    from ..store import OutputFolder, Shard

    if path.is_file():
        return [Shard(path)]
    if not path.is_dir():
        raise UsageError(f"{path} is not there; expected a folder or a shard.")
    sealed = OutputFolder(path).sealed_shards()
    for error in sealed.broken.values():
        click.echo(f"hiddentap: {error}", err=True)
    if not sealed.shards:
        raise UsageError(f"{path} holds no sealed shard.")
    return [sealed.shards[index] for index in sorted(sealed.shards)]


def _show(path: Path, shards: list[Shard]) -> None:
    from ..store import Manifest
    from .tables import size, table

    about = shards[0].metadata
    rows = [("shards", f"{len(shards)}, {size(sum(s.nbytes for s in shards))}")]
    rows.append(("samples", f"{sum(s.M for s in shards):,}, {sum(s.R for s in shards):,} rows"))
    rows += _about(about)
    rows += [
        (c.name, f"({', '.join(['R', *map(str, c.shape)])}) {str(c.dtype).removeprefix('torch.')}")
        for c in shards[0].columns
    ]
    manifest = path / "manifest.json"
    if manifest.is_file():
        complete = Manifest.read(manifest).complete
        rows.append(("complete", "yes" if complete else "no: the same capture command goes on with it"))
    rejects = sum(len(s.rejects) for s in shards)
    if rejects:
        rows.append(("rejected", f"{rejects} samples in the forward; see rejects.jsonl"))
    click.echo(table(rows))


def _about(about: dict[str, Any]) -> list[tuple[str, str]]:
    if "taps" not in about:
        return []
    taps, model = about["taps"], about["model"]
    ids = ", ".join(map(str, taps["layer_ids"]))
    return [
        ("model", f"{model['id']} ({model['class']}, n = {taps['num_hidden_layers']}, H = {taps['hidden_size']})"),
        ("layer ids", f"{ids} ({taps['convention']}), boundaries {', '.join(map(str, taps['boundaries']))}"),
        ("final norm", taps["final"]),
        ("mode", f"{about['mode']}, computed in {about['compute_dtype']}, stored in {about['store_dtype']}"),
    ]


def _show_sample(path: Path, sample_id: str, tokenizer: str | None) -> None:
    from ..data import Sample, TokeniseOptions, Tokeniser, marked_text
    from ..store import CapturedDataset
    from .quiet_libraries import quiet_libraries
    from .sample_rows import SampleRows, show_rows

    quiet_libraries()
    dataset = CapturedDataset(path, allow_incomplete=True)
    try:
        item = dataset[dataset.index_of(sample_id)]
    except KeyError as error:
        raise UsageError(f"{path} holds no sample {sample_id!r}.") from error
    ids, mask = item["input_ids"].int().numpy(), item["loss_mask"].numpy()
    sample = Sample(sample_id, item["source"], item["line"], ids, mask, "")
    tokens = Tokeniser(TokeniseOptions(tokenizer=tokenizer or dataset.metadata["model"]["id"])).tokenizer
    states, norms = _norms(dataset.metadata, item)
    show_rows(
        SampleRows(
            title=f"{sample_id} ({sample.source}:{sample.line}): {len(ids)} rows",
            pieces=marked_text(tokens, sample),
            tokens=[str(tokens.decode([token])) for token in ids.tolist()],
            ids=ids.tolist(),
            supervised=mask.astype(bool).tolist(),
            states=states,
            norms=norms,
        )
    )


def _norms(metadata: dict[str, Any], item: dict[str, Any]) -> tuple[list[str], list[list[float]]]:
    """Names of the item's states, and per row the norm of each."""
    import numpy as np

    from ..report.measures import row_norms
    from ..report.states import named_states, rows_of

    shapes = {name: tuple(item[name].shape[1:]) for name in item if hasattr(item[name], "shape")}
    states = named_states(shapes, metadata)
    norms = (
        np.stack([row_norms(rows_of(state, item)) for state in states], axis=1)
        if states
        else np.empty((len(item["input_ids"]), 0))
    )
    return [state.label for state in states], norms.tolist()
