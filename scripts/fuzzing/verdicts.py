"""What came of a draw: its rows beside those of plain forwards."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from hiddentap import HiddentapError

from .draws import Draw
from .oracle import Irregular, Unrunnable, plain_rows
from .running import Shown, Silent, WrongPlace, run, run_plainly
from .wrappers import WRAPPERS

Kind = Literal["equal", "refused", "cannot run", "wrong", "silent", "crashed", "refused without need"]
FINDINGS: tuple[Kind, ...] = ("wrong", "silent", "crashed", "refused without need")

FLOAT32_BOUND, CACHED_BOUND = 1e-5, 1e-4
"""Of a row's norm: float32 rows that ran in a batch, and on a cache, where recurrences are summed in other pieces; or
`ROUNDINGS` times what rounding the weights costs the plain rows, where that is more."""
MOST_ROUNDING, ROUNDINGS = 1e-3, 8.0


@dataclass(frozen=True)
class Verdict:
    """kind: what came of it; detail: the reason of a refusal, or how far off the rows are."""

    kind: Kind
    detail: str = ""

    @property
    def is_finding(self) -> bool:
        return self.kind in FINDINGS


class Oracle:
    """The plain rows of one draw, each from a model made anew."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self._known: dict[tuple[tuple[int, ...], int, torch.dtype, bool], Tensor] = {}

    def _model(self) -> torch.nn.Module:
        model = self._draw.model()
        WRAPPERS[self._draw.wrapper].wrap(model)  # LoRA changes the model in place
        return model

    def rows(self, ids: Tensor, dtype: torch.dtype, last: int | None = None, *, rounded: bool = False) -> Tensor:
        """(L, K, H) of one forward; of several over ever longer sequences where `last` is less than L.

        last: how many rows the first of those shows; each later one adds the row of its last token.
        rounded: of a model whose weights are all off by up to half a unit in the last place of float32.
        """
        draw, L = self._draw, len(ids)
        first = L if last is None else last
        key = (tuple(ids.tolist()), first, dtype, rounded)
        if key not in self._known:
            parts = []
            for end in range(first, L + 1):
                model = self._model() if dtype is draw.dtype else self._model().to(dtype)
                if rounded:
                    _round_weights(model)
                parts.append(plain_rows(model, draw.family.path, draw.layer_ids, ids[:end]))
            self._known[key] = torch.cat([parts[0], *(part[-1:] for part in parts[1:])])
        return self._known[key]

    def counts_positions_from_zero(self, ids: Tensor) -> bool:
        """Whether position ids 0..L-1 are what the model takes by itself; some begin behind their padding id."""
        draw, positions = self._draw, torch.arange(len(ids))[None]
        try:
            given = plain_rows(self._model(), draw.family.path, draw.layer_ids, ids, position_ids=positions)
        except Unrunnable:  # it takes none
            return True
        return torch.allclose(given, self.rows(ids, draw.dtype))


@torch.no_grad()
def _round_weights(model: torch.nn.Module) -> None:
    noise = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.mul_(1 + (torch.rand(parameter.shape, generator=noise) - 0.5) * torch.finfo(torch.float32).eps)


def judge(draw: Draw) -> Verdict:
    """Run `draw` and compare."""
    oracle = Oracle(draw)
    try:
        regular = all(len(oracle.rows(sample, draw.dtype)) for sample in draw.samples())
        given = draw.way.positions or draw.way.entry == "generate"  # which gives them too
        if given and not oracle.counts_positions_from_zero(draw.samples()[0]):
            return Verdict("cannot run", "positions do not count from 0")
    except Unrunnable as unable:
        return Verdict("cannot run", str(unable)[:160])
    except Irregular:
        regular = False
    try:
        shown = run(draw)
    except Exception as error:  # noqa: BLE001 - whatever comes out is what is judged
        return _of_error(draw, error, regular)
    if len(shown) != len(draw.lengths):
        return Verdict("silent", f"{len(shown)} of {len(draw.lengths)} samples")
    if not regular:
        return Verdict("wrong", "rows of layers that give no (L, H) state")
    worst = max((_difference(draw, oracle, some) for some in shown), default=0.0)
    return Verdict("wrong" if worst > 0 else "equal", f"off by {worst:.2g}" if worst else "")


def _of_error(draw: Draw, error: Exception, regular: bool) -> Verdict:
    if isinstance(error, Silent):
        return Verdict("silent", str(error))
    if isinstance(error, WrongPlace):
        return Verdict("wrong", str(error))
    if _is_own(error):
        return Verdict(
            "refused without need" if regular and _must_run(draw) else "refused", " ".join(str(error).split())
        )
    try:
        run_plainly(draw)
    except Exception as plain:  # noqa: BLE001 - the model's own, whatever it is
        return Verdict("cannot run", f"{type(plain).__name__}: {plain}"[:160])
    return Verdict("crashed", f"{type(error).__name__}: {error}")


def _is_own(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(_is_own(inner) for inner in error.exceptions)
    return isinstance(error, HiddentapError)


def _must_run(draw: Draw) -> bool:
    """Whether a refusal would keep somebody from what is right: one plain sample of an ordinary model."""
    if draw.way.entry == "threads":  # what one thread may do, several may
        alone = draw.in_way(replace(draw.way, entry="mixin"))
        return judge(alone).kind == "equal"
    remembers = "dynamic" in str(draw.fields.get("rope_parameters"))
    return draw.way.exact and draw.wrapper == "none" and draw.family.ordinary and not remembers


def _difference(draw: Draw, oracle: Oracle, shown: Shown) -> float:
    """How far rows are off where rounding does not explain it, else 0."""
    expected = oracle.rows(shown.ids, draw.dtype)
    if shown.rows.shape != expected.shape or shown.rows.dtype != expected.dtype:
        return float("inf")
    if draw.way.exact:
        return 0.0 if torch.equal(shown.rows, expected) else max(_error(shown.rows, expected), 1e-12)
    off = _beyond_rounding(draw, oracle, shown, None)
    if off and shown.prompt < len(shown.ids):
        # Where a token's own forward is another than that of the whole sequence, its row may be that of its own.
        off = min(off, _beyond_rounding(draw, oracle, shown, shown.prompt))
    return off


def _beyond_rounding(draw: Draw, oracle: Oracle, shown: Shown, last: int | None) -> float:
    """Half precision has no constant bound: its error against float32 is compared with that of plain forwards.

    Of all rows the median and the 0.9 quantile: where a router flips, single rows of right runs are far off.
    """
    expected = oracle.rows(shown.ids, draw.dtype, last)
    if draw.dtype is torch.float32:
        off = _error(shown.rows, expected)
        bound = CACHED_BOUND if draw.way.keeps_a_cache else FLOAT32_BOUND
        if not bound < off < MOST_ROUNDING:
            return 0.0 if off <= bound else off
        rounding = _error(expected, oracle.rows(shown.ids, draw.dtype, last, rounded=True))
        return off if off > ROUNDINGS * rounding else 0.0
    exact = oracle.rows(shown.ids, torch.float32, last)
    found, plain = (
        row_errors(rows, exact).quantile(torch.tensor([0.5, 0.9]).double()) for rows in (shown.rows, expected)
    )
    return 0.0 if bool((found <= 2 * plain + 0.02).all()) else float(found.max())


def _error(rows: Tensor, expected: Tensor) -> float:
    return float(row_errors(rows, expected).max())


def row_errors(a: Tensor, b: Tensor) -> Tensor:
    """(L, K): the distance of each row, relative to its norm."""
    a, b = a.double(), b.double()
    return torch.linalg.vector_norm(a - b, dim=-1) / torch.linalg.vector_norm(b, dim=-1).clamp_min(1e-30)


def reason(detail: str) -> str:
    """A refusal's text without its numbers and names, to count refusals by."""
    words = re.sub(r"\b[A-Z]\w+(ForCausalLM|ForConditionalGeneration|LMHeadModel|Model|Decoder)\w*", "MODEL", detail)
    words = re.sub(r"[\w.]*\blayers?\.\d+|[\w.]*\.(h|blocks|layer)\.\d+", "LAYER", words)
    return re.sub(r"\d[\d.e-]*", "N", words)[:90]
