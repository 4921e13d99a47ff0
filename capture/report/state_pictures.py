"""Pictures of the stored states: norms, variances, cosines, large dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from .drawing import NUMBERS, Palette, label_states, new_axes
from .measures import percentiles, relative_sizes
from .survey import Survey


def draw_norms(survey: Survey, palette: Palette) -> Axes:
    """The norm of rows per state, the first token of samples apart."""
    axes, profile = new_axes(), survey.profile
    inner = ~profile.first
    bands = np.array([percentiles(state.norms[inner], (5, 50, 95)) for state in profile.states])
    firsts = [percentiles(state.norms[profile.first], (50,))[0] for state in profile.states]
    _bands(axes, bands, palette, "all other tokens: median, 5-95 %")
    axes.plot(firsts, "D", color=palette.accent, markersize=6, label="first token of a sample: median", zorder=3)
    _log_if_wide(axes, [*bands.ravel(), *firsts])
    axes.set_ylabel("norm of a row")
    axes.legend(loc="best", fontsize=9)
    label_states(axes, _labels(survey))
    return axes


def draw_variances(survey: Survey, palette: Palette) -> Axes:
    """The variance of dimensions over tokens, per state."""
    axes = new_axes()
    bands = np.array([percentiles(state.variances, (5, 50, 95)) for state in survey.profile.states])
    _bands(axes, bands, palette, "dimensions: median, 5-95 %")
    _log_if_wide(axes, bands.ravel())
    axes.set_ylabel("variance over tokens")
    axes.legend(loc="best", fontsize=9)
    label_states(axes, _labels(survey))
    return axes


def draw_cosines(survey: Survey, palette: Palette) -> Axes:
    """The cosine between neighbouring states."""
    axes, inner = new_axes(), ~survey.profile.first
    bands = np.array([percentiles(pair.cosines[inner], (5, 50, 95)) for pair in survey.profile.pairs])
    _bands(axes, bands, palette, "tokens: median, 5-95 %")
    for place, median in enumerate(bands[:, 1] if len(bands) <= 8 else ()):
        axes.annotate(f"{median:.3f}", (place, median), (9, 0), textcoords="offset points", va="center", fontsize=9)
    axes.axhline(1, color=palette.muted, linewidth=1, linestyle="--")
    axes.set_ylim(min(0.0, float(np.nanmin(bands)) * 1.1) if np.isfinite(bands).any() else 0, 1.05)
    axes.set_ylabel("cosine, row by row")
    label_states(axes, [f"{pair.before.label}\nand {pair.after.label}" for pair in survey.profile.pairs])
    axes.legend(loc="best", fontsize=9)
    return axes


def draw_outliers(survey: Survey, palette: Palette) -> Axes:
    """The size of dimensions beside the median dimension, per state."""
    axes, states = new_axes(3.6), survey.profile.states
    few = len(states) <= 8
    for place, state in enumerate(states):
        ratios = relative_sizes(state.mean_abs)
        top = np.argsort(-ratios, kind="stable")[:5]
        rest = np.delete(ratios, top)
        axes.vlines(place, *percentiles(rest, (0, 100)), color=palette.main, linewidth=5, alpha=0.35)
        axes.plot([place] * len(top), ratios[top], "o", color=palette.accent, markersize=5)
        for number, at in zip(top[:2].tolist(), ratios[top[:2]].tolist(), strict=True) if few else ():
            axes.annotate(f"dim {number}", (place, at), (8, 0), textcoords="offset points", va="center", fontsize=9)
    axes.plot([], [], "o", color=palette.accent, label="the 5 largest dimensions")
    axes.plot([], [], color=palette.main, linewidth=5, alpha=0.35, label="all others")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(NUMBERS)
    axes.set_ylabel("mean |value| / that of\nthe median dimension")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.14), ncols=2, fontsize=9)
    label_states(axes, _labels(survey))
    return axes


def _bands(axes: Axes, bands: NDArray[np.float64], palette: Palette, label: str) -> None:
    places = np.arange(len(bands))
    axes.vlines(places, bands[:, 0], bands[:, 2], color=palette.main, linewidth=5, alpha=0.35)
    axes.plot(places, bands[:, 1], "o", color=palette.main, markersize=6, label=label)


def _log_if_wide(axes: Axes, values: Sequence[float] | NDArray[np.float64]) -> None:
    shown = np.asarray(values, np.float64)
    shown = shown[np.isfinite(shown)]
    if len(shown) and shown.min() > 0 and shown.max() / shown.min() > 20:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(NUMBERS)


def _labels(survey: Survey) -> list[str]:
    return [state.state.label for state in survey.profile.states]
