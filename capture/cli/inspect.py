"""`hiddentap inspect`: what a folder or one shard holds, from its own headers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...models.errors import UsageError
from .json_values import show_json
from .options import json_option

if TYPE_CHECKING:
    from ..store import Column, Shard
    from .sample_rows import SampleRows


@click.command()
@click.argument("path", type=click.Path(path_type=Path), metavar="OUT")
@click.option(
    "--sample", "sample_id", metavar="ID", help="Show this sample: its text, its tokens with loss mask and norms."
)
@click.option("--tokenizer", metavar="M", help="Tokenizer to show text with.  [default: the one of the captured model]")
@json_option
def inspect(path: Path, sample_id: str | None, tokenizer: str | None, as_json: bool) -> int:
    """Say what the folder or the shard OUT holds."""
    if sample_id is not None:
        from .sample_rows import show_rows

        sample = _sample(path, sample_id, tokenizer)
        if as_json:
            show_json(sample)
        else:
            show_rows(sample)
        return 0
    shards = _shards(path)
    if as_json:
        show_json(_values(path, shards))
    else:
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


def _values(path: Path, shards: list[Shard]) -> dict[str, Any]:
    return {
        "path": path,
        "shards": len(shards),
        "bytes": sum(shard.nbytes for shard in shards),
        "samples": sum(shard.M for shard in shards),
        "rows": sum(shard.R for shard in shards),
        "rejected": sum(len(shard.rejects) for shard in shards),
        "complete": _complete(path),
        "columns": {column.name: {"shape": column.shape, "dtype": _dtype(column)} for column in shards[0].columns},
        "metadata": shards[0].metadata,
    }


def _complete(path: Path) -> bool | None:
    """Whether the capture is complete; None where no manifest says."""
    from ..store import Manifest

    manifest = path / "manifest.json"
    return Manifest.read(manifest).complete if manifest.is_file() else None


def _dtype(column: Column) -> str:
    return str(column.dtype).removeprefix("torch.")


def _show(path: Path, shards: list[Shard]) -> None:
    from .tables import size, table

    about = shards[0].metadata
    rows = [("shards", f"{len(shards)}, {size(sum(s.nbytes for s in shards))}")]
    rows.append(("samples", f"{sum(s.M for s in shards):,}, {sum(s.R for s in shards):,} rows"))
    rows += _about(about)
    rows += [(c.name, f"({', '.join(['R', *map(str, c.shape)])}) {_dtype(c)}") for c in shards[0].columns]
    complete = _complete(path)
    if complete is not None:
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


def _sample(path: Path, sample_id: str, tokenizer: str | None) -> SampleRows:
    from ..data import Sample, TokeniseOptions, Tokeniser, marked_text
    from ..store import CapturedDataset
    from .quiet_libraries import quiet_libraries
    from .sample_rows import SampleRows

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
    return SampleRows(
        title=f"{sample_id} ({sample.source}:{sample.line}): {len(ids)} rows",
        pieces=marked_text(tokens, sample),
        tokens=[str(tokens.decode([token])) for token in ids.tolist()],
        ids=ids.tolist(),
        supervised=mask.astype(bool).tolist(),
        states=states,
        norms=norms,
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
