"""`hiddentap audit`: what a run would supervise, truncate and reject, without a forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from .groups import OptionGroup, grouped, option
from .options import DATA, MODEL, REPORTING, ROWS, TEXT, TOKENIZING, model_source, say_if_nothing, text_settings
from .output import json_value, show_json
from .printable import printable

if TYPE_CHECKING:
    from ..data import Audit, Item, RecordEncoder, Sample
    from ..progress import Progress


SHOWN = OptionGroup(
    "Output",
    (
        option(
            "--row", type=click.IntRange(1), default=1, show_default=True, help="Captured sample to show with its loss mask."
        ),
    ),
)  # fmt: skip


@grouped(MODEL, DATA, ROWS, TEXT, SHOWN, TOKENIZING, REPORTING)
def audit(**given: Any) -> int:
    """Tokenize the input as `capture` would and count what is supervised, truncated and rejected; show one sample.

    The sample is shown with its loss mask. No forward is run.
    """
    from ..data import audit as count_items
    from .output import quiet_libraries
    from .progress import shown_progress

    quiet_libraries()
    shown: list[Sample] = []
    gate = text_settings(given).gate()
    with shown_progress(given["quiet"]) as progress:
        encoder, items = _items(given, progress)
        result = count_items(_watched(items, given["row"], shown, progress), gate)
    if given["as_json"]:
        show_json({**json_value(result), "sample": _marks(encoder, shown[0]) if shown else None})
    elif not given["quiet"]:
        show_audit(result)
        for sample in shown:
            _show_marks(encoder, sample)
    rejected = sum(result.rejected.values())
    if not result.ending:
        say_if_nothing(result.captured, rejected, what="left to capture")
    elif given["quiet"] or given["as_json"]:
        show_ending(result)
    return 0 if result.captured and not result.ending else 1


def _watched(items: Iterator[Item], row: int, shown: list[Sample], progress: Progress) -> Iterator[Item]:
    """Yield the items; append sample number `row` to `shown`."""
    from ..data import Sample
    from ..progress import Done, Work

    seen = 0
    progress.started(Work("tokenizing", unit="rows"))
    for item in items:
        if isinstance(item, Sample):
            seen += 1
            if seen == row:
                shown.append(item)
        progress.advanced(Done(1, rejected=int(not isinstance(item, Sample))))
        yield item


def _items(given: dict[str, Any], progress: Progress) -> tuple[RecordEncoder, Iterator[Item]]:
    import datetime

    from ...models.config import stated_positions
    from ...models.decoder import text_config
    from ...models.loading import load_config
    from ..data import RecordEncoder, tokenise

    source = model_source(given)
    config = load_config(source)
    text, note = text_settings(given).fitted_to(stated_positions(config))
    vocab_rows = getattr(text_config(config), "vocab_size", None)
    today = datetime.date.today().isoformat()
    options = text.tokenise_options(source, date=today, vocab_rows=vocab_rows)
    encoder = RecordEncoder(options)
    for line in filter(None, [note, *encoder.notes()]):
        progress.note(printable(line))
    return encoder, tokenise(given["data"], encoder, workers=text.workers, limit=text.limit)


def show_audit(result: Audit) -> None:
    """Print the counts of an audit."""
    from .output import table, warning_lines

    share = f" ({100 * result.supervised_tokens / result.tokens:.1f} %)" if result.tokens else ""
    rows = [
        ("rows", f"{result.rows:,}: {result.captured:,} would be captured, {sum(result.rejected.values()):,} rejected"),
        ("tokens", f"{result.tokens:,}, {result.supervised_tokens:,} supervised{share}"),
        ("truncated", f"{result.truncated:,} samples"),
        ("lengths", ", ".join(f"p{p} {length:,}" for p, length in result.length_percentiles.items())),
        ("mask rules", ", ".join(f"{rule} {count:,}" for rule, count in result.mask_rules.items())),
    ]
    rows += warning_lines(result.warnings, result.first_warning)
    rows += [("fields read", ", ".join(f"{name} {count:,}" for name, count in result.fields_read.items()))]
    rows += [("not read", f"field {name!r} of {count:,} samples") for name, count in result.fields_unread.items()]
    for code, count in result.rejected.items():
        first = result.first_reject[code]
        rows.append(("rejected", f"{count:,} {code}; first {first.source}:{first.line}: {first.reason}"))
    click.echo(table(rows))
    if result.ending:
        show_ending(result)


def show_ending(result: Audit) -> None:
    """Print the error that aborts a run over this input."""
    click.echo(printable(f"hiddentap: a run over this input would end with: {result.ending}"), err=True)


def _marks(encoder: Any, sample: Sample) -> dict[str, Any]:
    from ..data import marked_text

    who = {"sample_id": sample.sample_id, "source": sample.source, "line": sample.line}
    return who | {"pieces": [list(piece) for piece in marked_text(encoder.tokenizer, sample)]}


def _show_marks(encoder: Any, sample: Sample) -> None:
    from ..data import marked_text
    from .sample_rows import show_marked

    click.echo(
        f"\nSample {sample.sample_id!r} ({printable(sample.source)}:{sample.line}); what is [[marked]] is supervised:\n"
    )
    show_marked(marked_text(encoder.tokenizer, sample))
