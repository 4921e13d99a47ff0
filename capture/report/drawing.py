"""The look of a figure: colors for light and dark pages, plain axes, PNG bytes."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

DPI = 150
WIDTH, HEIGHT = 7.2, 3.3
_MOST_LABELS = 14

THOUSANDS = FuncFormatter(lambda value, _: f"{value:,.0f}")
NUMBERS = FuncFormatter(lambda value, _: f"{value:,g}")


@dataclass(frozen=True)
class Palette:
    """Colors of a page; `main` and `accent` are of Okabe and Ito's set, which color-blind eyes tell apart."""

    ink: str
    muted: str
    grid: str
    face: str
    main: str
    accent: str


LIGHT = Palette("#1f2328", "#59636e", "#dfe3e8", "#ffffff", "#0072b2", "#d55e00")
DARK = Palette("#e6edf3", "#9aa4af", "#2b323b", "#14181d", "#56b4e9", "#e69f00")


@contextmanager
def colors(palette: Palette) -> Iterator[None]:
    """Figures made inside have these colors."""
    settings: dict[Any, Any] = {
        "figure.facecolor": palette.face, "axes.facecolor": palette.face, "text.color": palette.ink,
        "axes.edgecolor": palette.muted, "axes.labelcolor": palette.ink, "xtick.color": palette.muted,
        "ytick.color": palette.muted, "xtick.labelcolor": palette.ink, "ytick.labelcolor": palette.ink,
        "grid.color": palette.grid, "grid.linewidth": 0.8, "axes.grid": True, "axes.axisbelow": True,
        "axes.spines.top": False, "axes.spines.right": False, "font.size": 10, "legend.frameon": False,
        "axes.unicode_minus": True,
    }  # fmt: skip
    with rc_context(settings):
        yield


def new_axes(height: float = HEIGHT) -> Axes:
    """Axes of a new figure that belongs to nothing else."""
    return Figure(figsize=(WIDTH, height), layout="constrained").add_subplot()


def png(axes: Axes) -> bytes:
    """Return the figure as a PNG."""
    buffer = io.BytesIO()
    axes.figure.canvas.print_figure(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def label_states(axes: Axes, labels: Sequence[str]) -> None:
    """Name the places 0, 1, ... of the horizontal axis, every few of them where there are many."""
    step = -(-len(labels) // _MOST_LABELS)
    slanted: dict[str, Any] = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if len(labels) > 8 else {}
    axes.set_xticks(range(0, len(labels), step), labels[::step], **slanted)
    axes.set_xlim(-0.5, len(labels) - 0.5)
    axes.grid(visible=False, axis="x")


def label_counts(axes: Axes, what: str, counted: str) -> Axes:
    """Name the axes of a figure that counts things; returns them."""
    axes.set_xlabel(what)
    axes.set_ylabel(counted)
    axes.yaxis.set_major_formatter(THOUSANDS)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=False, axis="x")
    return axes


def legend_above(axes: Axes) -> None:
    """Draw the legend in one line above the axes."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize=9, borderaxespad=0.3, handletextpad=0.4)
