#!/usr/bin/env python
"""Fuzz the model side: random tiny models, run in random ways, beside plain forwards that share no code with hiddentap.

Each draw is a random config of a random family and a random way to run it: padding and who tells of it, position ids, caches,
dtypes, wrappers, threads, and every public entry point. What is captured must be what single, unpadded, plain forwards show
(bit for bit where one sample runs alone, within 1e-5 of each row's norm in float32 otherwise), or that way of running must be
refused by an error of hiddentap's own. Nothing is downloaded.

    python scripts/fuzz_models.py --draws 1000 --seed 1     # one line for each draw that is not as it should be, and a summary
    python scripts/fuzz_models.py --only 1:17 1:423         # these draws again, in full

Verdicts: equal; refused (with the reason); cannot run (the model itself does not run so). Findings, which make the exit status
1: wrong (other rows, no word), silent (nothing was captured, no word), crashed (an error that is not hiddentap's), refused
without need (one plain sample of an ordinary model, or what works from one thread and not from several).
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import torch  # noqa: E402
import transformers  # noqa: E402
from fuzzing.draws import draw  # noqa: E402
from fuzzing.verdicts import FINDINGS, Verdict, judge, reason  # noqa: E402


def quiet() -> None:
    """One thread, as bits are compared, and no word of other libraries."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=100, help="how many (default 100)")
    parser.add_argument("--seed", type=int, default=1, help="of the draws (default 1)")
    parser.add_argument("--first", type=int, default=0, help="number of the first draw (default 0)")
    parser.add_argument("--only", nargs="+", default=[], metavar="SEED:DRAW", help="these draws alone, in full")
    parser.add_argument("--all", action="store_true", help="print every draw, not findings alone")
    given = parser.parse_args()
    quiet()
    numbered = [(given.seed, given.first + i) for i in range(given.draws)]
    if given.only:
        numbered = [(int(seed), int(number)) for seed, _, number in (text.partition(":") for text in given.only)]
    started, verdicts = time.monotonic(), []
    for seed, number in numbered:
        one = draw(seed, number)
        verdict = judge(one)
        verdicts.append(verdict)
        if given.only:
            print(
                f"{one}\n  fields {dict(one.fields)}\n  layers {one.layer_ids}\n  {verdict.kind}: {verdict.detail}",
                flush=True,
            )
        elif given.all or verdict.is_finding:
            print(f"{one}: {verdict.kind}: {verdict.detail[:200]}", flush=True)
    print(summary(verdicts, time.monotonic() - started))
    return int(any(verdict.is_finding for verdict in verdicts))


def summary(verdicts: list[Verdict], seconds: float) -> str:
    """Counts by verdict, and of refusals by reason."""
    kinds = Counter(verdict.kind for verdict in verdicts)
    reasons = Counter(reason(verdict.detail) for verdict in verdicts if verdict.kind == "refused")
    findings = sum(kinds[kind] for kind in FINDINGS)
    return "\n".join(
        [
            f"{len(verdicts)} draws in {seconds:.0f} s, {findings} findings: "
            + ", ".join(f"{kind} {count}" for kind, count in kinds.most_common()),
            *(f"  refused {count:4}: {text}" for text, count in reasons.most_common()),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
