"""The report as one HTML file that loads nothing from elsewhere."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from html import escape

from .facts import LAYER_TABLE_HEAD, facts, layer_table
from .figures import Figure
from .page_style import STYLE
from .survey import Survey
from .verdict import Notice, headline


def page(survey: Survey, found: Sequence[Notice], figures: Sequence[Figure]) -> str:
    """Return the whole page: verdict, facts, figures, numbers."""
    title = f"Report of {survey.path.resolve().name}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        _verdict(survey, found),
        _facts(survey),
        *(_figure(figure) for figure in figures),
        _numbers(survey),
    ]
    return _PAGE.format(title=escape(title), style=STYLE, body="\n".join(parts))


def _verdict(survey: Survey, found: Sequence[Notice]) -> str:
    weight = found[0].weight if found else "fine"
    lines = [f'<section class="verdict {weight}">', f"<h2>{escape(headline(list(found)))}</h2>"]
    if found:
        lines += ["<ul>", *(_notice(notice) for notice in found), "</ul>"]
    lines.append(f"<p>{_prose(_what_was_read(survey))}</p>")
    return "\n".join([*lines, "</section>"])


def _notice(notice: Notice) -> str:
    return f'<li class="{notice.weight}"><strong>{escape(notice.found)}</strong><br>{_prose(notice.meaning)}</li>'


def _what_was_read(survey: Survey) -> str:
    read = (
        f"All {survey.rows:,} rows were read."
        if survey.read_all
        else f"{survey.rows_read:,} of {survey.rows:,} rows were read: those of {len(survey.places):,} samples spread "
        f"evenly over all {len(survey.lengths):,}. What concerns few samples may be among the others."
    )
    return f"{read} Nothing was compared with a model here: `hiddentap verify` does that, and reads every byte."


def _facts(survey: Survey) -> str:
    rows = "".join(
        f"<tr><th scope=row>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts(survey)
    )
    return f'<table class="facts">{rows}</table>'


def _figure(figure: Figure) -> str:
    caption = escape(figure.caption)
    return (
        f'<figure id="{figure.name}"><h2>{escape(figure.title)}</h2><picture>'
        f'<source media="(prefers-color-scheme: dark)" srcset="{_data(figure.dark)}">'
        f'<img src="{_data(figure.light)}" alt="{escape(figure.title)}: {caption}"></picture>'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _numbers(survey: Survey) -> str:
    head = "".join(f"<th scope=col>{escape(name)}</th>" for name in LAYER_TABLE_HEAD)
    rows = "".join(
        f"<tr><th scope=row>{escape(row[0])}</th>" + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in layer_table(survey)
    )
    return (
        f'<section><h2>Numbers</h2><div class="wide"><table class="numbers"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def _prose(text: str) -> str:
    """Text whose `commands` stand out."""
    return _COMMAND.sub(r"<code>\1</code>", escape(text))


def _data(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


_COMMAND = re.compile(r"`([^`]+)`")

# The policy keeps the page from loading anything, whatever ids and reasons it shows.
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""
