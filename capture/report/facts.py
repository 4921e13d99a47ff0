"""The report's tables: what the folder says of itself, and the numbers behind the pictures."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    rows += _model(about.get("model"), about.get("taps"))
    if "store_dtype" in about:
        rows.append(
            ("rows stored in", f"{about['store_dtype']}, computed in {about.get('compute_dtype')}, {about.get('mode')}")
        )
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
    if survey.seals is not None:
        rows.append(("speed", f"{survey.seals.rows[-1] / survey.seals.seconds[-1]:,.0f} rows/s, pauses included"))
    if survey.sampled is not None and len(survey.sampled.top_differences):
        rows.append(("log-probabilities", _agreement(survey.sampled.top_differences)))
    return rows


def layer_table(survey: Survey) -> list[tuple[str, ...]]:
    """One row per state, as text, under `LAYER_TABLE_HEAD`."""
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


def _model(model: Any, taps: Any) -> list[tuple[str, str]]:
    rows = []
    if isinstance(model, Mapping):
        rows.append(("model", f"{model.get('id')} ({model.get('class')})"))
    if isinstance(taps, Mapping) and taps.get("layer_ids"):
        ids = _some(taps["layer_ids"])
        rows.append(
            (
                "layers",
                f"{ids} of {taps.get('num_hidden_layers')} ({taps.get('convention')}), H = {taps.get('hidden_size')}",
            )
        )
    return rows


def _agreement(differences: NDArray[np.float32]) -> str:
    largest = float(differences.max())
    how = "equal those" if largest == 0 else f"differ by at most {largest:.2g} from those"
    return f"{how} that the stored top logits give, in {len(differences):,} rows"


def _some(ids: Sequence[Any]) -> str:
    """All of few ids, and the ends of many."""
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
