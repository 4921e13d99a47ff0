#!/usr/bin/env python
"""Try the taps on every model type that transformers maps to a causal LM, and on image-text models used with text.

A tiny random model of each type is made from its config class and runs once while *every* module of it is recorded. Which
modules are the layers and the norm is told from the record by value alone, then each boundary and the norm states are
tapped and compared with it bit for bit. Then three samples run in other ways (padded on either side, on a cache in several
steps) beside plain forwards of each alone, as `scripts/fuzz_models.py` does it. And the model is saved, and its rows with
streamed weights are compared with those of it in memory. Nothing is downloaded.

    python scripts/sweep_architectures.py                      # print the table
    python scripts/sweep_architectures.py --write              # and write docs/architectures.md and README's table
    python scripts/sweep_architectures.py --only mllama rwkv   # a few, with the reasons in full
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import torch  # noqa: E402
import transformers  # noqa: E402
from fuzzing.shown_ways import counts_by_way, run_in_shown_ways, ways_table  # noqa: E402
from fuzzing.verdicts import Verdict  # noqa: E402
from readme_table import write_readme  # noqa: E402

from hiddentap.models.adapter_names import ADAPTERS  # noqa: E402
from support import architectures  # noqa: E402
from support.recorder import equal  # noqa: E402
from support.streamed_rows import Streamed, streamed  # noqa: E402
from support.taps_against_record import Comparison, compare  # noqa: E402

PAGE = ROOT / "docs" / "architectures.md"
SECONDS_EACH = 240


@dataclass(frozen=True)
class Row:
    """What came of one model type.

    Attributes:
        result: ``exact`` | ``exact where it runs`` | ``exact through an adapter`` | ``refused`` | ``wrong`` | ``not built``.
        detail: adapters that are exact, and why the rest is refused.
        ways: what came of each of `fuzzing.shown_ways.SHOWN`; empty where no layer is tapped without an adapter.
        streamed: what came of it with streamed weights; None where no layer can be tapped.
    """

    model_type: str
    model_class: str = ""
    result: str = ""
    path: str = ""
    n: int | None = None
    form: str = ""
    norm: str = ""
    detail: str = ""
    ways: dict[str, Verdict] = field(default_factory=dict)
    streamed: Streamed | None = None


def examine(model_type: str) -> Row:
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    try:
        model = architectures.build(model_type)
    except Exception as failed:  # noqa: BLE001 - a type that cannot be built is a row of the table
        return Row(model_type, result="not built", detail=_first_line(failed))
    compared = compare(model, architectures.token_ids(2, 7))
    row = _row(model_type, type(model).__name__, compared)
    row = replace(row, ways=_ways(model_type, compared), streamed=_streamed(model_type, compared))
    wrong = [f"{name}: {v.detail}" for name, v in row.ways.items() if v.is_finding]
    if row.streamed is not None and row.streamed.kind == "different":
        wrong.append(f"streamed: {row.streamed.detail}")
    return replace(row, result="wrong", detail="; ".join(wrong)) if wrong else row


def _ways(model_type: str, compared: Comparison) -> dict[str, Verdict]:
    """Three samples in each way of running, at layers that were exact at once."""
    layer_ids = [b - 1 for b in compared.exact if b > 0]
    if compared.path is None or not layer_ids:
        return {}
    return run_in_shown_ways(model_type, compared.path, layer_ids, ordinary=compared.adapter is None)


def _streamed(model_type: str, compared: Comparison) -> Streamed | None:
    """Streamed rows beside those of the model in memory, at every layer that is exact, through an adapter if it needs one."""
    through = {None: compared, **compared.adapters}
    name, best = max(through.items(), key=lambda item: len(item[1].exact))
    layer_ids = [b - 1 for b in best.exact if b > 0]
    if compared.path is None or not layer_ids:
        return None
    with tempfile.TemporaryDirectory() as folder:
        final = "both" if best.norm == "exact" else "none"
        return streamed(architectures.build(model_type), Path(folder), layer_ids, final=final, adapter=name)


def _row(model_type: str, model_class: str, c: Comparison) -> Row:
    form = c.truth.output_form if c.truth else ""
    known = {"model_type": model_type, "model_class": model_class, "path": c.path or "", "n": c.n, "form": form}
    if c.wrong or c.norm == "wrong" or any(a.wrong or a.norm == "wrong" for a in c.adapters.values()):
        return Row(**known, result="wrong", norm=c.norm, detail=f"boundaries {c.wrong}, {_wrong_adapters(c)}")
    if c.truth is None or c.path is None:
        return Row(**known, result="refused", detail=_short(c.failure or "no modules feed each other"))
    norm = c.truth.norm_path or "none"
    complete = [name for name, a in c.adapters.items() if not a.refused and a.norm in ("exact", "none")]
    if _identity_layers(c):
        return Row(
            **known, result="wrong", norm=norm, detail=f"layers {_identity_layers(c)} change nothing: a weak test"
        )
    if not c.refused:
        by_structure = f"read by {c.adapter}, chosen by structure" if c.adapter else ""
        return Row(
            **known, result="exact", norm=norm, detail=by_structure if c.norm in ("exact", "none") else _short(c.norm)
        )
    why = _short(next(iter(c.refused.values())))
    if complete:
        some = f"; without one, boundaries {_ranges(c.exact)} are exact" if c.exact else ""
        return Row(**known, result="exact through an adapter", norm=norm, detail=f"{', '.join(complete)}{some}. {why}")
    if c.exact and all(" ran 0 times" in why for why in c.refused.values()):
        return Row(**known, result="exact where it runs", norm=norm, detail=why)
    partly = [f"{name}: boundaries {_ranges(a.exact)} are exact" for name, a in c.adapters.items() if a.exact]
    plain = [f"boundaries {_ranges(c.exact)} are exact"] if c.exact else []
    return Row(**known, result="refused", norm=norm, detail="; ".join([*plain, *partly, why]))


def _identity_layers(c: Comparison) -> list[int]:
    """Layers that give out what they take in: their boundaries could be mixed up and nobody would see."""
    assert c.truth is not None
    pairs = list(zip(c.truth.layer_in, c.truth.layer_out, strict=True))
    return [i for i, (a, b) in enumerate(pairs) if a is not None and b is not None and equal(a, b)]


def _wrong_adapters(c: Comparison) -> str:
    return "; ".join(f"{name}: {a.wrong} {a.norm}" for name, a in c.adapters.items() if a.wrong or a.norm == "wrong")


def _ranges(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _first_line(error: Exception) -> str:
    return _short(" ".join(f"{type(error).__name__}: {error}".split()))


def _short(text: str) -> str:
    sentence = text.split(" This model needs an adapter")[0].split(" Name ")[0].strip().replace("|", "/")
    return sentence if len(sentence) <= 240 else f"{sentence[:237]}..."


def examined(names: list[str], jobs: int, seconds: int) -> Iterator[Row]:
    """One process for each model type, `jobs` at a time: a crash or a hang is one row, and the sweep goes on."""
    context, waiting = multiprocessing.get_context("fork"), list(names)
    running: dict[str, tuple[Any, Connection, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            receiving, sending = context.Pipe(duplex=False)
            process = context.Process(target=_send_row, args=(name, sending))
            process.start()
            sending.close()
            running[name] = (process, receiving, time.monotonic())
        multiprocessing.connection.wait([r for _, r, _ in running.values()], timeout=1.0)
        for name, (process, receiving, started) in list(running.items()):
            late = time.monotonic() - started > seconds
            if not receiving.poll() and process.is_alive() and not late:
                continue
            yield _received(name, receiving, seconds if late else None)
            process.kill()
            process.join()
            del running[name]


def _send_row(name: str, sending: Connection) -> None:
    sending.send(examine(name))
    sending.close()


def _received(name: str, receiving: Connection, late_after: int | None) -> Row:
    try:
        if receiving.poll():
            return receiving.recv()
    except EOFError:
        pass
    if late_after is not None:
        return Row(name, result="not measured", detail=f"took more than {late_after} s")
    return Row(name, result="wrong", detail="the process crashed")


def page(causal: list[Row], image_text: list[Row]) -> str:
    """The page docs/architectures.md."""
    exact = sum(row.result in ("exact", "exact where it runs") for row in causal)
    kinds = Counter(row.streamed.kind for row in causal if row.streamed)
    found = sum(bool(row.path) for row in causal)
    lines = [
        "# Architectures",
        "",
        f"Written by `python scripts/sweep_architectures.py --write`; transformers {transformers.__version__}.",
        "",
        f"The sweep builds a tiny random model of each of the {len(causal)} model types that transformers maps to a causal LM, "
        f"and of {len(image_text)} further image-text models, which get text only. It runs each model once and records the "
        "inputs and outputs of every module. It identifies the decoder layers and the final norm by comparing the recorded "
        "values: a layer's output is the next layer's input. Then it taps every boundary, the pre-norm state and the "
        "post-norm state, and compares them with the record bit for bit.",
        "",
        f"- Layers found: **{found}** of {len(causal)}. Exact without an adapter: **{exact}**. Wrong: "
        f"**{sum(row.result == 'wrong' for row in causal + image_text)}**.",
        "- *exact*: every tapped boundary equals the recorded one; *read by A, chosen by structure*: hiddentap takes adapter A "
        "by itself, because the layers allow no other reading. *exact where it runs*: some layers do not run on text; taps "
        "on these are refused with an error that names them, and every other boundary is exact. *exact through an adapter*: "
        "the model needs an adapter, and those listed are exact. *refused*: attaching the taps raises the error that is "
        "quoted. *not built*: the tiny model could not be built on the machine of the sweep. *not measured*: the model took "
        f"more than {SECONDS_EACH} s.",
        "- *norm*: the final norm, between the last decoder layer and the LM head. Its input is the pre-norm state, its output "
        "the post-norm state. *none*: the model has no final norm, and a request for either state is refused.",
        "- *streamed*: the saved model runs once with `--stream-weights` and once in memory, samples one by one and in one "
        "batch. The rows of all layers that can be tapped exactly are compared bit for bit. *equal*: all bits agree. "
        "*refused*: `--stream-weights` raises an error for this model. *cannot run*: the saved model gives no rows in memory "
        "either. Of the causal LMs: "
        f"{', '.join(f'{kind} {count}' for kind, count in kinds.most_common())}.",
        "",
        *_adapters(),
        *_table("Causal language models", causal),
        *_table("Image-text models, with text alone", image_text),
        *ways_table({row.model_type: row.ways for row in causal + image_text if row.ways}),
    ]
    return "\n".join(lines)


def _adapters() -> list[str]:
    lines = [
        "## Adapters",
        "",
        "An adapter selects which tensor of a layer is its hidden state, if there is more than one candidate. Choose one with "
        '`tap(..., adapter="...")` or `--adapter`.',
        "",
        "| adapter | reads |",
        "| --- | --- |",
    ]
    return [*lines, *(f"| `{name}` | {adapter.about} |" for name, adapter in ADAPTERS.items()), ""]


def _table(title: str, rows: list[Row]) -> list[str]:
    counts = ", ".join(f"{result} {count}" for result, count in Counter(row.result for row in rows).most_common())
    head = ["model type", "class", "layers", "n", "layer returns", "norm", "streamed", "result"]
    lines = [f"## {title}", "", f"{counts}.", "", "| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in sorted(rows, key=lambda row: row.model_type):
        result = f"{row.result}: {row.detail}" if row.detail else row.result
        path = f"`{row.path}`" if row.path else ""
        form = row.form.replace("|", "\\|")
        norm = row.norm if row.norm in ("", "none") else f"`{row.norm}`"
        n = "" if row.n is None else str(row.n)
        cells = [row.model_type, row.model_class, path, n, form, norm, _streamed_cell(row.streamed), result]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def _streamed_cell(streamed: Streamed | None) -> str:
    if streamed is None:
        return ""
    return f"{streamed.kind}: {_short(' '.join(streamed.detail.split()))}" if streamed.detail else streamed.kind


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="TYPE", help="these model types alone")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default 2)")
    parser.add_argument("--seconds", type=int, default=SECONDS_EACH, help=f"most for one type (default {SECONDS_EACH})")
    given = parser.parse_args()
    names = given.only or [*architectures.CAUSAL_LMS, *architectures.IMAGE_TEXT_MODELS]
    rows = []
    for row in examined(names, given.jobs, given.seconds):
        rows.append(row)
        if given.only or row.result not in ("exact", "exact where it runs"):
            print(f"{row.model_type:28} {row.result:26} {row.path:34} {row.form:24} {row.detail}", flush=True)
        if given.only or (row.streamed is not None and row.streamed.kind != "equal"):
            print(f"{row.model_type:28} streamed: {_streamed_cell(row.streamed)}", flush=True)
    causal = [row for row in rows if row.model_type in architectures.CAUSAL_LMS]
    image_text = [row for row in rows if row.model_type not in architectures.CAUSAL_LMS]
    for title, some in (("causal", causal), ("image-text", image_text)):
        print(
            f"{title}: {len(some)}, layers found {sum(bool(r.path) for r in some)},",
            dict(Counter(r.result for r in some)),
        )
        print(*(f"  {line}" for line in counts_by_way(row.ways for row in some)), sep="\n")
        print("  streamed:", dict(Counter(row.streamed.kind for row in some if row.streamed)))
    if given.write:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(causal, image_text), encoding="utf-8")
        write_readme()
    return int(any(row.result == "wrong" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
