"""`hiddentap inspect`: what a folder or one shard holds, from its own headers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...models.errors import UsageError
from .options import json_option
from .output import show_json

if TYPE_CHECKING:
    from ..store import Shard, ShardDescription
    from .sample_rows import SampleRows


@click.command()
@click.argument("path", type=click.Path(path_type=Path), metavar="OUT")
@click.option(
    "--sample",
    "sample_id",
    metavar="ID",
    help="Show this sample: its text, and each token with its loss mask and the norms of its rows.",
)
@click.option("--tokenizer", metavar="M", help="Tokenizer that decodes the text.  [default: the captured model's]")
@json_option
def inspect(path: Path, sample_id: str | None, tokenizer: str | None, as_json: bool) -> int:
    """Print what the folder or shard OUT holds."""
    if sample_id is not None:
        from .sample_rows import show_rows

        sample = _sample(path, sample_id, tokenizer)
        if as_json:
            show_json(sample)
        else:
            show_rows(sample)
        return 0
    from ..reading.inspection import inspect_capture, readable_shards

    shards, broken = readable_shards(path)
    for error in broken:
        click.echo(f"hiddentap: {error}", err=True)
    if as_json:
        show_json(inspect_capture(path))
    else:
        _show(path, shards)
    return 0


def _show(path: Path, shards: list[Shard]) -> None:
    from ..reading.inspection import dtype_name, finish_reasons, is_complete
    from ..store import Manifest
    from .output import counted, size, table

    about = shards[0].description
    rows = [("shards", f"{len(shards)}, {size(sum(s.nbytes for s in shards))}")]
    rows.append(("samples", f"{sum(s.M for s in shards):,}, {sum(s.R for s in shards):,} rows"))
    rows += _about(about)
    rows += [(c.name, f"({', '.join(['R', *map(str, c.shape)])}) {dtype_name(c)}") for c in shards[0].columns]
    complete = is_complete(path)
    if complete is not None:
        rows.append(("complete", "yes" if complete else f"no. {Manifest.read(path / 'manifest.json').way_on}"))
    reasons = finish_reasons(path)
    if reasons is not None:
        rows.append(("ended by", counted(reasons)))
    rejects = sum(len(s.rejects) for s in shards)
    if rejects:
        rows.append(("rejected", f"{rejects} samples in the forward; see rejects.jsonl"))
    click.echo(table(rows))


def _about(about: ShardDescription) -> list[tuple[str, str]]:
    taps, model = about.taps, about.model
    if taps is None:
        return []
    adapter = _adapter(model)
    ids, boundaries = (", ".join(map(str, numbers)) for numbers in (taps.layer_ids, taps.boundaries))
    return [
        ("model", f"{model.get('id')} ({model.get('class')}, n = {taps.n}, H = {taps.H})"),
        *([("adapter", adapter)] if adapter else []),
        ("layer ids", f"{ids} ({taps.convention}), boundaries {boundaries}"),
        ("final norm", taps.final),
        ("mode", f"{_mode(about)}, computed in {about.compute_dtype}, stored in {about.store_dtype}"),
    ]


def _mode(about: ShardDescription) -> str:
    chunk = about.json.get("prefill_chunk")
    return f"{about.mode}, long samples in chunks of {chunk}" if chunk else str(about.mode)


def _adapter(model: Mapping[str, Any]) -> str | None:
    """Return which peft adapter a header says its model had; None where it says nothing of one."""
    sha = model.get("peft_adapter_sha256")
    if sha is None:
        return model.get("peft_adapter")
    return f"{model.get('peft_adapter') or 'the one in the folder of the model'} (sha256 {str(sha)[:12]})"


def _sample(path: Path, sample_id: str, tokenizer: str | None) -> SampleRows:
    from ..data import RecordEncoder, Sample, TokeniseOptions, marked_text
    from ..store import CapturedDataset
    from .output import quiet_libraries
    from .sample_rows import SampleRows

    quiet_libraries()
    dataset = CapturedDataset(path, allow_incomplete=True)
    try:
        item = dataset[dataset.index_of(sample_id)]
    except KeyError as error:
        raise UsageError(f"{path} holds no sample {sample_id!r}.") from error
    ids, mask = item["input_ids"].int().numpy(), item["loss_mask"].numpy()
    sample = Sample(sample_id, item["source"], item["line"], ids, mask, "")
    tokens = RecordEncoder(TokeniseOptions(tokenizer=tokenizer or dataset.description.model["id"])).tokenizer
    states, norms = _norms(dataset.description, item)
    return SampleRows(
        title=f"{sample_id} ({sample.source}:{sample.line}): {len(ids)} rows",
        pieces=marked_text(tokens, sample),
        tokens=[str(tokens.decode([token])) for token in ids.tolist()],
        ids=ids.tolist(),
        supervised=mask.astype(bool).tolist(),
        states=states,
        norms=norms,
    )


def _norms(description: ShardDescription, item: dict[str, Any]) -> tuple[list[str], list[list[float]]]:
    """Return the names of the item's states, and per row the norm of each."""
    import numpy as np

    from ..report.measures import row_norms
    from ..report.states import ordered_states

    shapes = {name: tuple(item[name].shape[1:]) for name in item if hasattr(item[name], "shape")}
    states = ordered_states(description, shapes)
    norms = (
        np.stack([row_norms(state.rows(item).float()) for state in states], axis=1)
        if states
        else np.empty((len(item["input_ids"]), 0))
    )
    return [state.label for state in states], norms.tolist()
