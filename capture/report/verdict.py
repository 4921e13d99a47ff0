"""Anomalies of a folder, in plain words.

Each rule is silent about what ordinary models and data do: very large values at a sample's first token, a few large
dimensions, norms that grow with depth. Its threshold stands beside it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .measures import group_medians, group_shares, percentiles
from .profile import PairProfile, StateProfile
from .survey import Survey

Weight = Literal["wrong", "look"]

SAME_DIRECTION = 0.999
NEARLY_THE_SAME = 0.9999
NORM_FACTOR = 3.0
FEWEST_ROWS = 8
FEW_ROWS = 64
CUT_SHARE = 0.2
MASK_SHARE = 0.02
UNSUPERVISED_SHARE = 0.05
REJECT_SHARE = 0.05
LOGPROB_ERROR = 1e-2
SUPPORT_UNKNOWN_SHARE = 0.01
TOP_LOGITS_SHARE = 0.9
_SHOWN = 5


@dataclass(frozen=True)
class Notice:
    """One thing to look at.

    weight: "wrong" for what no sound capture shows, "look" for what may be meant.
    found: what was found, with numbers. meaning: what that means and what to do.
    """

    weight: Weight
    found: str
    meaning: str


def notices(survey: Survey) -> list[Notice]:
    """Everything unusual, what is wrong first; [] where nothing is."""
    found = [notice for rule in _RULES for notice in rule(survey)]
    return sorted(found, key=lambda notice: notice.weight != "wrong")


def headline(found: list[Notice]) -> str:
    """Return the verdict in one line."""
    if not found:
        return "Nothing unusual."
    wrong = sum(notice.weight == "wrong" for notice in found)
    looks = len(found) - wrong
    parts = [f"{wrong} thing{'s' * (wrong > 1)} that cannot be right"] if wrong else []
    parts += [f"{looks} thing{'s' * (looks > 1)} to look at"] if looks else []
    return " and ".join(parts).capitalize() + "."


def _unreadable(survey: Survey) -> Iterator[Notice]:
    for error in survey.broken:
        yield Notice(
            "wrong", error, "Run `hiddentap verify --repair`, then the capture again: it makes this shard anew."
        )


def _incomplete(survey: Survey) -> Iterator[Notice]:
    if survey.complete is False:
        yield Notice(
            "look",
            f"The capture is not complete: {len(survey.lengths):,} samples are sealed so far.",
            f"{survey.way_on} What follows speaks of the sealed samples.",
        )


def _bad_values(survey: Survey) -> Iterator[Notice]:
    for state in survey.profile.states:
        for count, what in ((state.non_finite, "values that are not finite"), (state.all_zero, "zeros alone")):
            if count:
                yield Notice(
                    "wrong",
                    f"{state.state.label}: {_of(count, survey.rows_read)} rows hold {what}.",
                    "A trainer would learn nothing or NaN from them. `hiddentap verify` names the samples; capture again "
                    "with --on-bad-values reject, in float32 or bfloat16 if float16 overflowed.",
                )


def _repeated_rows(survey: Survey) -> Iterator[Notice]:
    for state in survey.profile.states:
        if state.repeated:
            yield Notice(
                "wrong",
                f"{state.state.label}: {_of(state.repeated, survey.rows_read)} rows equal the row before, "
                "although another token stands there.",
                "Different tokens do not have equal states: these rows were written twice or never filled.",
            )


def _constant_dimensions(survey: Survey) -> Iterator[Notice]:
    for state in survey.profile.states:
        dead = len(state.constant)
        if dead and survey.rows_read >= FEW_ROWS:
            shown = ", ".join(map(str, state.constant[:_SHOWN].tolist())) + (", ..." if dead > _SHOWN else "")
            yield Notice(
                "look",
                f"{state.state.label}: {_of(dead, len(state.variances))} dimensions have one value in all rows ({shown}).",
                "They carry nothing. A model with pruned or unused dimensions does this; otherwise part of each row "
                "was not written.",
            )


def _same_direction(survey: Survey) -> Iterator[Notice]:
    for state in survey.profile.states:
        if state.pair_cosine > SAME_DIRECTION and survey.rows_read >= FEW_ROWS:
            yield Notice(
                "look",
                f"{state.state.label}: the mean cosine between two tokens is {state.pair_cosine:.5f}.",
                "All tokens point the same way, so the rows hardly tell them apart: look whether this is the tensor that "
                "was meant.",
            )


def _equal_states(survey: Survey) -> Iterator[Notice]:
    for pair in survey.profile.pairs:
        if _one_place(pair):
            continue
        names = f"{pair.before.label} and {pair.after.label}"
        if pair.equal:
            yield Notice(
                "wrong",
                f"{names} are equal in {_of(pair.equal, survey.rows_read)} rows.",
                "Two layers do not leave a row unchanged: one of them is a copy of the other, as when ids are off by one.",
            )
            continue
        (median,) = percentiles(pair.cosines[~survey.profile.first], (50,))
        if median > NEARLY_THE_SAME:
            yield Notice(
                "look",
                f"{names} have a median cosine of {median:.6f}.",
                "They are nearly the same state. If they are not meant to be, look at the layer ids; either way the "
                "second tells a drafter little more than the first.",
            )


def _one_place(pair: PairProfile) -> bool:
    """Return whether both states were read at one boundary, as the last layer's output and the norm's input mostly are."""
    same = pair.before.boundary == pair.after.boundary and not pair.after.normed
    return pair.before.boundary is not None and same


def _norm_jumps(survey: Survey) -> Iterator[Notice]:
    profile, samples = survey.profile, len(survey.places)
    inner = ~profile.first
    enough = np.bincount(profile.sample[inner], minlength=samples) >= FEWEST_ROWS
    for state in profile.states:
        medians = group_medians(state.norms[inner], profile.sample[inner], samples)
        (middle,) = percentiles(medians[enough], (50,))
        if not middle > 0:
            continue
        ratios = medians / middle
        far = np.flatnonzero(enough & ((ratios > NORM_FACTOR) | (ratios < 1 / NORM_FACTOR)))
        if len(far):
            yield _norm_jump(survey, state, middle, medians, far.tolist())


def _norm_jump(
    survey: Survey, state: StateProfile, middle: float, medians: NDArray[np.float64], far: list[int]
) -> Notice:
    shown = ", ".join(f"{survey.places[place].sample_id!r} ({medians[place]:.3g})" for place in far[:_SHOWN])
    more = ", ..." if len(far) > _SHOWN else ""
    return Notice(
        "look",
        f"{state.state.label}: {_of(len(far), len(survey.places))} samples have norms more than {NORM_FACTOR:g} times "
        f"above or below the others (median {middle:.3g}): {shown}{more}.",
        "Within one model samples differ far less. Either their text is of another kind (one token over and over, noise), "
        "or they come from another model, layer or norm state.",
    )


def _lengths(survey: Survey) -> Iterator[Notice]:
    M, longest = len(survey.lengths), int(survey.lengths.max())
    at_limit = int((survey.lengths == survey.max_length).sum()) if survey.max_length else 0
    cut = survey.truncated if survey.truncated is not None else at_limit
    if cut > CUT_SHARE * M:
        limit = f" at {survey.max_length:,} tokens" if survey.max_length else ""
        yield Notice(
            "look",
            f"{_of(cut, M)} samples were cut{limit}.",
            "Their ends, often the answer, are missing. Capture with a larger --max-length if the model takes it.",
        )
    elif M >= 10 and longest > 1 and int(survey.lengths.min()) == longest:
        yield Notice(
            "look",
            f"All {M:,} samples have {longest:,} tokens.",
            "Conversations differ in length: the input was probably packed, padded or cut before.",
        )


def _loss_mask(survey: Survey) -> Iterator[Notice]:
    marks = survey.profile.loss_mask
    if len(marks) == 0:
        return
    share = float(marks.mean())
    if share < MASK_SHARE:
        yield Notice(
            "look",
            f"The loss mask marks {100 * share:.2f} % of the tokens.",
            "There is almost nothing to train on: look at one sample with `hiddentap inspect --sample`.",
        )
    shares = group_shares(marks, survey.profile.sample, len(survey.places))
    none = int((shares == 0).sum())
    if share >= MASK_SHARE and none > UNSUPERVISED_SHARE * len(shares):
        yield Notice(
            "look",
            f"{_of(none, len(shares))} samples have no token that the loss mask marks.",
            "They take room and train nothing: their answers were cut off, or their roles are not those of the template.",
        )


def _warnings(survey: Survey) -> Iterator[Notice]:
    for code, (count, first) in survey.warnings.items():
        yield Notice(
            "look",
            f"{_of(count, len(survey.lengths))} samples have the warning {code}"
            + (f", first {first}." if first else "."),
            "docs/rows.md says what it means; `hiddentap audit --strict` names such rows.",
        )


def _rejects(survey: Survey) -> Iterator[Notice]:
    count = survey.rejects.total()
    total = count + len(survey.lengths)
    if count > REJECT_SHARE * total:
        reason, most = survey.rejects.most_common(1)[0]
        yield Notice(
            "look",
            f"{_of(count, total)} input rows were rejected, {most:,} of them for: {reason}.",
            "rejects.jsonl names each with its reason.",
        )


def _supports(survey: Survey) -> Iterator[Notice]:
    if survey.sampled is None or len(survey.sampled.supports) == 0:
        return
    supports = survey.sampled.supports
    unknown = int((supports == 0).sum())
    if unknown > SUPPORT_UNKNOWN_SHARE * len(supports):
        yield Notice(
            "look",
            f"{_of(unknown, len(supports))} sampled rows have no sampling support.",
            "It was larger than what a row may keep, or the sampled token lay outside of it.",
        )


def _logprobs(survey: Survey) -> Iterator[Notice]:
    sampled = survey.sampled
    if sampled is None:
        return
    above = int((sampled.of_sampler > 1e-4).sum() + (sampled.of_model > 1e-4).sum())
    if above or sampled.sure_misses:
        yield Notice(
            "wrong",
            f"{above:,} log-probabilities are above 0, and {sampled.sure_misses:,} tokens that were the only choice "
            "have one other than 0.",
            "They are no log-probabilities of these tokens.",
        )
    off = int((sampled.top_differences > LOGPROB_ERROR).sum())
    if off:
        yield Notice(
            "wrong",
            f"{_of(off, len(sampled.top_differences))} log-probabilities differ by more than {LOGPROB_ERROR:g} from those "
            "that the stored top logits give.",
            "Both are of the same logits: rows and tokens are misaligned.",
        )


def _of(count: int, total: int) -> str:
    share = 100 * count / total
    return f"{count:,} of {total:,} ({share:.1f} %)" if share >= 0.05 else f"{count:,} of {total:,}"


def _top_logits(survey: Survey) -> Iterator[Notice]:
    mass = survey.top_logits
    if mass is not None and mass.mean < TOP_LOGITS_SHARE:
        yield Notice(
            "look",
            f"The stored top logits hold {mass.mean:.1%} of the probability, on average.",
            "A trainer that distils from them never sees the rest. Capture with a larger --top-logits, or use the head: stored "
            "rows give the whole distribution.",
        )


_RULES: tuple[Callable[[Survey], Iterator[Notice]], ...] = (
    _unreadable, _incomplete, _bad_values, _repeated_rows, _equal_states, _same_direction, _constant_dimensions,
    _norm_jumps, _lengths, _loss_mask, _warnings, _rejects, _supports, _logprobs, _top_logits,
)  # fmt: skip
