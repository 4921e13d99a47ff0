"""Figures of the samples: lengths, loss mask, rejects, and when they were sealed."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from .drawing import THOUSANDS, Palette, label_counts, legend_above, new_axes
from .measures import group_shares
from .survey import Survey

_UNITS = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))


def draw_lengths(survey: Survey, palette: Palette) -> Axes:
    """Return how many samples have how many tokens."""
    axes = new_axes()
    axes.hist(survey.lengths, bins=_length_bins(survey.lengths), color=palette.main, edgecolor=palette.face)
    if survey.max_length and survey.lengths.max() > 0.5 * survey.max_length:
        label = f"max-length: {survey.max_length:,}"
        axes.axvline(survey.max_length, color=palette.accent, linestyle="--", label=label)
        legend_above(axes)
    return label_counts(axes, "tokens of a sample", "samples")


def draw_loss_mask(survey: Survey, palette: Palette) -> Axes:
    """Return how many samples have which share of supervised tokens."""
    axes = new_axes()
    shares = group_shares(survey.profile.loss_mask, survey.profile.sample, len(survey.places))
    axes.hist(shares, bins=np.linspace(0, 1, 21).tolist(), color=palette.main, edgecolor=palette.face)
    overall = float(survey.profile.loss_mask.mean())
    axes.axvline(overall, color=palette.accent, linestyle="--", label=f"of all tokens: {100 * overall:.1f} %")
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlim(0, 1)
    legend_above(axes)
    axes.set_xlabel("tokens of a sample that the loss mask marks")
    axes.set_ylabel("samples")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=False, axis="x")
    return axes


def draw_rejects(survey: Survey, palette: Palette) -> Axes:
    """Rejected input rows by reason."""
    found = survey.rejects.most_common(12)[::-1]
    axes = new_axes(0.9 + 0.36 * len(found))
    names = [_shortened(reason) for reason, _ in found]
    bars = axes.barh(range(len(found)), [count for _, count in found], color=palette.main)
    axes.set_yticks(range(len(found)), names)
    axes.bar_label(bars, [f"{count:,}" for _, count in found], padding=4, fontsize=9)
    axes.margins(x=0.12)
    axes.set_xlabel("input rows")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=False, axis="y")
    return axes


def draw_throughput(survey: Survey, palette: Palette) -> Axes:
    """Rows sealed over time."""
    axes = new_axes()
    if survey.seals is not None:
        seconds = survey.seals.seconds
        unit, size = next(pair for pair in _UNITS if seconds[-1] >= 2 * pair[1] or pair[1] == 1)
        axes.plot(seconds / size, survey.seals.rows, color=palette.main, marker=".", linewidth=1.6)
        axes.set_xlabel(f"{unit} since the start")
    axes.yaxis.set_major_formatter(THOUSANDS)
    axes.set_ylabel("rows sealed")
    axes.set_ylim(bottom=0)
    return axes


def _length_bins(lengths: NDArray[np.int64]) -> list[float]:
    """Return at most 30 bins whose edges are round numbers."""
    longest = int(lengths.max())
    step = next(
        size for power in range(12) for size in (10**power, 2 * 10**power, 5 * 10**power) if 30 * size >= longest
    )
    return [step * place - 0.5 for place in range(longest // step + 2)]


def _shortened(reason: str) -> str:
    return reason if len(reason) <= 46 else reason[:45] + "…"
