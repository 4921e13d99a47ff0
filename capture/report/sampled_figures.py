"""Figures of what generation recorded: sampling supports and log-probabilities."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes

from .drawing import Palette, label_counts, legend_above, new_axes
from .sampled import SampledProfile


def draw_supports(sampled: SampledProfile, palette: Palette) -> Axes:
    """Return how many tokens rows were sampled from, in bins that double."""
    axes = new_axes()
    sizes = sampled.supports
    known = sizes[sizes > 0]
    edges = 2.0 ** np.arange(int(np.log2(known.max())) + 2) if len(known) else np.array([1.0, 2.0])
    counts, _ = np.histogram(known, edges)
    names = [f"{low:,.0f}" if high - low == 1 else f"{low:,.0f}-{high - 1:,.0f}" for low, high in pairwise(edges)]
    unknown = int((sizes == 0).sum())
    if unknown:
        counts, names = np.append(counts, unknown), [*names, "not kept"]
    axes.bar(names, counts, color=palette.main, width=0.9)
    axes.tick_params(axis="x", rotation=30 if len(names) > 8 else 0)
    return label_counts(axes, "tokens that a row was sampled from", "rows")


def draw_logprobs(sampled: SampledProfile, palette: Palette) -> Axes:
    """Log-probabilities of sampled tokens, under the model and under what they were sampled from."""
    axes = new_axes(4.6)
    axes.plot(
        sampled.of_model, sampled.of_sampler, ".", color=palette.main, markersize=4, alpha=_alpha(len(sampled.of_model))
    )
    low = min(-1e-3, float(min(sampled.of_model.min(), sampled.of_sampler.min())))
    axes.plot([low, 0], [low, 0], "--", color=palette.accent, linewidth=1.2, label="equal")
    axes.set_xlabel("log-probability under the model (nats)")
    axes.set_ylabel("log-probability in what\nit was sampled from (nats)")
    legend_above(axes)
    return axes


def _alpha(points: int) -> float:
    return float(np.clip(300 / max(points, 1), 0.06, 0.7))
