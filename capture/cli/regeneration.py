"""The summary of a regeneration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ..regeneration import RegenerationSummary


def show_regeneration(summary: RegenerationSummary) -> None:
    """Print what was written and captured."""
    from .output import counted, share_of_top_logits, size, table

    capture = summary.capture
    speed = summary.new_tokens_now / summary.seconds if summary.seconds > 0 else 0.0
    named = "; ".join(f"{', '.join(map(str, tokens))} ({origin})" for origin, tokens in summary.end_tokens.items())
    rows = [
        ("samples", f"{capture.captured:,} captured, {capture.rejected:,} rejected"),
        ("turns", f"{summary.turns:,} written anew"),
        (
            "tokens",
            f"{summary.new_tokens:,} new, {summary.supervised_tokens:,} of them supervised; {capture.tokens:,} rows",
        ),
        ("ended by", counted(summary.finish_reasons) or "nothing ran"),
        ("end tokens", named or "none"),
        ("layers", f"{', '.join(map(str, capture.layer_ids))} ({capture.convention}), H = {capture.hidden_size}"),
        ("bytes", f"{size(capture.bytes)} in {capture.shards} shard(s)"),
        (
            "speed",
            f"{speed:,.1f} new tokens/s over {summary.seconds:.1f} s, then {capture.tokens_per_second:,.0f} rows/s",
        ),
        ("files", f"{summary.out}; conversations in {summary.messages}"),
    ]
    if summary.turns_kept:
        rows.insert(2, ("turns kept", f"{summary.turns_kept:,} that a tool's result follows, or that nothing precedes"))
    if summary.turns_left_out:
        rows.insert(2, ("turns left out", f"{summary.turns_left_out:,} behind conversations that had become too long"))
    if summary.pieces_done_before:
        rows.append(("resumed", f"{summary.pieces_done_before:,} of {summary.pieces:,} pieces were done before"))
    if capture.top_logits_share is not None:
        rows.append(("top logits", share_of_top_logits(capture.top_logits_share, capture.top_logits_quantiles)))
    rows += [
        ("rejected", f"{count:,} {code}; first {capture.first_reject[code]}")
        for code, count in capture.rejected_by_code.items()
    ]
    rows += [("not read", f"field {name!r} of {count:,} rows") for name, count in capture.unread_fields.items()]
    rows += [("model", note) for note in capture.notes]
    click.echo(table(rows))
    if capture.rejected:
        click.echo(f"Rejected rows, with their reasons: {summary.out / 'rejects.jsonl'}")
