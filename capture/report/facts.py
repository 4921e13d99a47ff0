"""The report's tables: what the folder says of itself, and the numbers behind the figures."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..store import KeptMass, ShardDescription
from .measures import percentiles, relative_sizes
from .profile import StateProfile
from .survey import Survey

LAYER_TABLE_HEAD = (
    "state", "norm: median", "5 %", "95 %", "first token", "variance: median", "largest dimension", "cosine to the next",
    "cosine between tokens",
)  # fmt: skip


def facts(survey: Survey) -> list[tuple[str, str]]:
    """Name and value of what a reader asks first."""
    about = survey.about
    low, middle, high = percentiles(survey.lengths, (5, 50, 95))
    rows = [("folder", str(survey.path))]
    rows += _model(about)
    if about.store_dtype is not None:
        rows.append(("rows stored in", f"{about.store_dtype}, computed in {about.compute_dtype}, {about.mode}"))
    rows.append(
        (
            "samples",
            f"{len(survey.lengths):,}, half of {middle:,.0f} tokens or fewer, nine of ten of {low:,.0f} to {high:,.0f}",
        )
    )
    rows.append(("rows", f"{survey.rows:,}, {survey.nbytes / 1e6:,.1f} MB"))
    if len(survey.profile.loss_mask):
        rows.append(("loss mask", f"marks {100 * float(survey.profile.loss_mask.mean()):.1f} % of the tokens"))
    rows.append(("rejected", f"{survey.rejects.total():,} input rows"))
    if survey.truncated is not None:
        rows.append(("truncated", f"{survey.truncated:,} samples"))
    if survey.top_logits is not None:
        rows.append(("top logits", _kept(survey.top_logits)))
    if survey.seals is not None:
        rows.append(("speed", f"{survey.seals.rows[-1] / survey.seals.seconds[-1]:,.0f} rows/s, pauses included"))
    if survey.sampled is not None and len(survey.sampled.top_differences):
        rows.append(("log-probabilities", _agreement(survey.sampled.top_differences)))
    return rows


def layer_table(survey: Survey) -> list[tuple[str, ...]]:
    """Return one row per state, as text, under `LAYER_TABLE_HEAD`."""
    profile = survey.profile
    nexts = [percentiles(pair.cosines[~profile.first], (50,))[0] for pair in profile.pairs]
    rows = []
    for place, state in enumerate(profile.states):
        low, middle, high = percentiles(state.norms[~profile.first], (5, 50, 95))
        (first,) = percentiles(state.norms[profile.first], (50,))
        (variance,) = percentiles(state.variances, (50,))
        numbers = [_number(value) for value in (middle, low, high, first, variance)]
        following = f"{nexts[place]:.4f}" if place < len(nexts) else ""
        rows.append((state.state.label, *numbers, _largest(state), following, f"{state.pair_cosine:.4f}"))
    return rows


def _model(about: ShardDescription) -> list[tuple[str, str]]:
    model, taps, rows = about.model, about.taps, []
    if model:
        rows.append(("model", f"{model.get('id')} ({model.get('class')})"))
    if taps is not None and taps.layer_ids:
        rows.append(("layers", f"{_some(taps.layer_ids)} of {taps.n} ({taps.convention}), H = {taps.H}"))
    return rows


def _kept(mass: KeptMass) -> str:
    low, middle, high = (100 * mass.quantiles[share] for share in ("0.05", "0.5", "0.95"))
    return (
        f"hold {100 * mass.mean:.1f} % of the probability on average, {middle:.1f} % in the median row, {low:.1f} to "
        f"{high:.1f} % in nine of ten rows"
    )


def _agreement(differences: NDArray[np.float32]) -> str:
    largest = float(differences.max())
    how = "equal those" if largest == 0 else f"differ by at most {largest:.2g} from those"
    return f"{how} that the stored top logits give, in {len(differences):,} rows"


def _some(ids: Sequence[Any]) -> str:
    """Return all of few ids, and the ends of many."""
    shown = list(map(str, ids))
    return ", ".join(shown if len(shown) <= 12 else [*shown[:3], "...", shown[-1]])


def _largest(state: StateProfile) -> str:
    ratios = relative_sizes(state.mean_abs)
    if len(ratios) == 0:
        return ""
    place = int(ratios.argmax())
    return f"{place} ({ratios[place]:.1f} x median)"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
