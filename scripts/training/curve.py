"""A figure of how numbers went during training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click


def draw_curves(path: Path, title: str, panels: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]]) -> None:
    """Write a PNG with one panel per quantity: panel name -> line name -> (step, value) points."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5 * len(panels), 3.5), squeeze=False, layout="constrained")
    for axis, (quantity, lines) in zip(axes[0], panels.items(), strict=True):
        for name, points in lines.items():
            axis.plot(*zip(*points, strict=True), label=name)
        axis.set(xlabel="step", ylabel=quantity)
        axis.grid(alpha=0.3)
        if len(lines) > 1:
            axis.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def require_matplotlib() -> None:
    """End the command before any training where the figure could not be drawn at its end."""
    _pyplot()


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise click.ClickException("the curve needs matplotlib: pip install 'hiddentap[report]'") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot
