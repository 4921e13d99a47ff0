"""Figures of the stored states: norms, variances, cosines, large dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter
from numpy.typing import NDArray

from .drawing import NUMBERS, Palette, label_states, legend_above, new_axes
from .measures import percentiles, relative_sizes
from .survey import Survey

# So many states leave room for words beside each.
_FEW = 8


def draw_norms(survey: Survey, palette: Palette) -> Axes:
    """Return the norm of rows per state, the first token of samples apart."""
    axes, profile = new_axes(), survey.profile
    inner = ~profile.first
    bands = np.array([percentiles(state.norms[inner], (5, 50, 95)) for state in profile.states])
    firsts = [percentiles(state.norms[profile.first], (50,))[0] for state in profile.states]
    _bands(axes, bands, palette, "all other tokens: median, 5-95 %")
    axes.plot(firsts, "D", color=palette.accent, markersize=6, label="first token of a sample: median", zorder=3)
    _log_if_wide(axes, [*bands.ravel(), *firsts])
    axes.set_ylabel("norm of a row")
    legend_above(axes)
    label_states(axes, _labels(survey))
    return axes


def draw_variances(survey: Survey, palette: Palette) -> Axes:
    """Return the variance of dimensions over tokens, per state."""
    axes = new_axes()
    bands = np.array([percentiles(state.variances, (5, 50, 95)) for state in survey.profile.states])
    _bands(axes, bands, palette, "dimensions: median, 5-95 %")
    _log_if_wide(axes, bands.ravel())
    axes.set_ylabel("variance over tokens")
    legend_above(axes)
    label_states(axes, _labels(survey))
    return axes


def draw_cosines(survey: Survey, palette: Palette) -> Axes:
    """Return the cosine between adjacent states."""
    axes, inner = new_axes(), ~survey.profile.first
    bands = np.array([percentiles(pair.cosines[inner], (5, 50, 95)) for pair in survey.profile.pairs])
    _bands(axes, bands, palette, "tokens: median, 5-95 %")
    for place, median in enumerate(bands[:, 1] if len(bands) <= _FEW else ()):
        axes.annotate(f"{median:.3f}", (place, median), (9, 0), textcoords="offset points", va="center", fontsize=9)
    axes.axhline(1, color=palette.muted, linewidth=1, linestyle="--")
    axes.set_ylim(min(0.0, float(np.nanmin(bands)) * 1.1) if np.isfinite(bands).any() else 0, 1.05)
    axes.set_ylabel("cosine, row by row")
    few = len(bands) <= _FEW
    label_states(axes, [f"{pair.before.label}\nand " * few + pair.after.label for pair in survey.profile.pairs])
    axes.set_xlabel("" if few else "each with the state before it")
    legend_above(axes)
    return axes


def draw_outliers(survey: Survey, palette: Palette) -> Axes:
    """Return the size of dimensions beside the median dimension, per state."""
    axes, states = new_axes(3.6), survey.profile.states
    few = len(states) <= _FEW
    for place, state in enumerate(states):
        ratios = relative_sizes(state.mean_abs)
        top = np.argsort(-ratios, kind="stable")[:5]
        rest = np.delete(ratios, top)
        low, high = percentiles(rest, (0, 100))
        axes.vlines(place, low, high, color=palette.main, linewidth=5, alpha=0.35)
        axes.plot([place] * len(top), ratios[top], "o", color=palette.accent, markersize=5)
        if few:
            names = f"{'dim' if len(top) == 1 else 'dims'} {', '.join(map(str, top[:2].tolist()))}"
            axes.annotate(names, (place, ratios[top[0]]), (8, 0), textcoords="offset points", va="center", fontsize=9)
    axes.plot([], [], "o", color=palette.accent, label="the 5 largest dimensions")
    axes.plot([], [], color=palette.main, linewidth=5, alpha=0.35, label="all others")
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.4), max(high, 20))
    axes.yaxis.set_major_formatter(NUMBERS)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("mean |value| / that of\nthe median dimension")
    legend_above(axes)
    label_states(axes, _labels(survey))
    axes.set_xlim(right=len(states) - 0.3)
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
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0)
    axes.margins(y=0.12)
    axes.yaxis.set_major_formatter(NUMBERS)


def _labels(survey: Survey) -> list[str]:
    return [state.state.label for state in survey.profile.states]
