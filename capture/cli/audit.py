"""`hiddentap audit`: what a run would supervise, cut and reject, without a forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ..progress import Work
from .json_values import json_value, show_json
from .marked import show_marked
from .options import model_options, model_source, output_options, text_options, text_settings

if TYPE_CHECKING:
    from ..data import Audit, Item, Sample
    from ..progress import Progress


@click.command()
@model_options
@text_options
@click.option(
    "--row", type=click.IntRange(1), default=1, show_default=True, help="Which captured sample to show with its marks."
)
@output_options
def audit(**given: Any) -> int:
    """Tokenise the input as `capture` would and say what would become of it; one sample is shown with its loss mask."""
    from ..data import RejectGate
    from ..data import audit as count_items
    from .progress import shown_progress
    from .quiet_libraries import quiet_libraries

    quiet_libraries()
    tokeniser, items = _items(given)
    shown: list[Sample] = []
    gate = RejectGate(given["allow_rejects"], strict=given["strict"])
    with shown_progress(given["quiet"]) as progress:
        result = count_items(_watched(items, given["row"], shown, progress), gate)
    if given["as_json"]:
        show_json({**json_value(result), "sample": _marks(tokeniser, shown[0]) if shown else None})
    elif not given["quiet"]:
        show_audit(result)
        for sample in shown:
            _show_marks(tokeniser, sample)
    return 0 if result.captured and not result.ending else 1


def _watched(items: Iterator[Item], row: int, shown: list[Sample], progress: Progress) -> Iterator[Item]:
    """The items as they pass; sample number `row` stays in `shown`."""
    from ..data import Sample

    seen = 0
    progress.started(Work("tokenising", unit="rows"))
    for item in items:
        if isinstance(item, Sample):
            seen += 1
            if seen == row:
                shown.append(item)
        progress.advanced(1, rejected=int(not isinstance(item, Sample)))
        yield item


def _items(given: dict[str, Any]) -> tuple[Any, Iterator[Item]]:
    import datetime

    from ...models.decoder import text_config
    from ...models.loading import load_config
    from ..data import Tokeniser, tokenise

    source = model_source(given)
    text = text_settings(given)
    vocab_rows = getattr(text_config(load_config(source)), "vocab_size", None)
    today = datetime.date.today().isoformat()
    options = text.tokenise_options(source, date=today, vocab_rows=vocab_rows)
    return Tokeniser(options), tokenise(given["data"], options, workers=text.workers, limit=text.limit)


def show_audit(result: Audit) -> None:
    """Print the counts of an audit."""
    from .tables import table

    share = f" ({100 * result.supervised_tokens / result.tokens:.1f} %)" if result.tokens else ""
    rows = [
        ("rows", f"{result.rows:,}: {result.captured:,} would be captured, {sum(result.rejected.values()):,} rejected"),
        ("tokens", f"{result.tokens:,}, {result.supervised_tokens:,} supervised{share}"),
        ("truncated", f"{result.truncated:,} samples"),
        ("lengths", ", ".join(f"p{p} {length:,}" for p, length in result.length_percentiles.items())),
        ("mask rules", ", ".join(f"{rule} {count:,}" for rule, count in result.mask_rules.items())),
    ]
    rows += [("warning", f"{count:,} {code}") for code, count in result.warnings.items()]
    for code, count in result.rejected.items():
        first = result.first_reject[code]
        rows.append(("rejected", f"{count:,} {code}; first {first.source}:{first.line}: {first.reason}"))
    click.echo(table(rows))
    if result.ending:
        click.echo(f"hiddentap: a run over this input would end with: {result.ending}", err=True)


def _marks(tokeniser: Any, sample: Sample) -> dict[str, Any]:
    from ..data import marked_text

    who = {"sample_id": sample.sample_id, "source": sample.source, "line": sample.line}
    return who | {"pieces": [list(piece) for piece in marked_text(tokeniser.tokenizer, sample)]}


def _show_marks(tokeniser: Any, sample: Sample) -> None:
    from ..data import marked_text

    click.echo(f"\nSample {sample.sample_id!r} ({sample.source}:{sample.line}); what is [[marked]] is supervised:\n")
    show_marked(marked_text(tokeniser.tokenizer, sample))
