"""The figures of a report, with their captions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.axes import Axes

from .drawing import DARK, LIGHT, Palette, colors, png
from .sample_figures import draw_lengths, draw_loss_mask, draw_rejects, draw_throughput
from .sampled_figures import draw_logprobs, draw_supports
from .state_figures import draw_cosines, draw_norms, draw_outliers, draw_variances
from .survey import Survey


@dataclass(frozen=True)
class Figure:
    """One figure as PNGs for light and for dark pages.

    name: of its file. title, caption: what it shows and how to read it.
    """

    name: str
    title: str
    caption: str
    light: bytes
    dark: bytes


def figures(survey: Survey) -> list[Figure]:
    """Return the figures that this folder has something to show for."""
    shown = [_of_states(survey), _of_samples(survey), _of_generation(survey)]
    return [figure for group in shown for figure in group]


def _of_states(survey: Survey) -> list[Figure]:
    if not survey.profile.states:
        return []
    found = [
        _figure("norms", "Norms per layer", _NORMS, lambda palette: draw_norms(survey, palette)),
        _figure("variance", "Variance per layer", _VARIANCE, lambda palette: draw_variances(survey, palette)),
    ]
    if survey.profile.pairs:
        found.append(_figure("cosine", "Neighboring layers", _COSINE, lambda palette: draw_cosines(survey, palette)))
    found.append(_figure("outliers", "Large dimensions", _OUTLIERS, lambda palette: draw_outliers(survey, palette)))
    return found


def _of_samples(survey: Survey) -> list[Figure]:
    found = [_figure("lengths", "Lengths", _LENGTHS, lambda palette: draw_lengths(survey, palette))]
    if len(survey.profile.loss_mask):
        found.append(_figure("loss-mask", "Loss mask", _LOSS_MASK, lambda palette: draw_loss_mask(survey, palette)))
    if survey.rejects:
        found.append(_figure("rejects", "Rejected rows", _REJECTS, lambda palette: draw_rejects(survey, palette)))
    if survey.seals is not None:
        drawn = _figure("throughput", "Rows over time", _THROUGHPUT, lambda palette: draw_throughput(survey, palette))
        found.append(drawn)
    return found


def _of_generation(survey: Survey) -> list[Figure]:
    sampled, found = survey.sampled, []
    if sampled is not None and len(sampled.supports):
        found.append(
            _figure("supports", "Sampling supports", _SUPPORTS, lambda palette: draw_supports(sampled, palette))
        )
    if sampled is not None and len(sampled.of_model):
        found.append(
            _figure("logprobs", "Log-probabilities", _LOGPROBS, lambda palette: draw_logprobs(sampled, palette))
        )
    return found


def _figure(name: str, title: str, caption: str, draw: Callable[[Palette], Axes]) -> Figure:
    drawn = []
    for palette in (LIGHT, DARK):
        with colors(palette):
            drawn.append(png(draw(palette)))
    return Figure(name, title, caption, *drawn)


_NORMS = (
    "The Euclidean length of each row. Growing with depth is ordinary, and so is a first token far above the rest: many "
    "models park very large values there, and a few tokens that follow may share them."
)
_VARIANCE = (
    "How much each dimension varies from token to token, first tokens left out. A band that reaches down by orders of "
    "magnitude means dimensions that hardly carry anything."
)
_COSINE = (
    "How much of its direction a token keeps from one captured layer to the next. Near 1 throughout: the two layers say "
    "nearly the same; exactly 1: they are one state, as the last layer and pre-norm are in most models, or one is a copy."
)
_OUTLIERS = (
    "Mean size of each dimension beside the median dimension. A few dimensions tens of times larger are ordinary; they "
    "matter where rows are stored or trained on in few bits."
)
_LENGTHS = "Tokens per sample, of all samples."
_LOSS_MASK = (
    "How much of a sample a trainer learns from. Short answers to long prompts give small shares; none at all means that "
    "no answer was found or that it was cut off."
)
_REJECTS = "Input rows that were not captured, by reason; rejects.jsonl names each."
_THROUGHPUT = (
    "When shards were sealed, by the times of their files. A straight line is steady work, a flat stretch a pause. In a "
    "copied folder these are the times of the copy."
)
_SUPPORTS = "How many tokens were left to draw from, per row. 1 is a certain choice. Bars cover sizes that double."
_LOGPROBS = (
    "Each sampled token's log-probability under the model against that in the distribution it was drawn from. Cutting off "
    "tokens (top-k, top-p) lifts points above the line; a temperature bends them; without either they lie on it."
)
