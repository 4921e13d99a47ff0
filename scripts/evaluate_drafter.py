#!/usr/bin/env python3
"""Measure draft models on held-out prompts: acceptance length and acceptance rate, through transformers' own generate().

    python scripts/evaluate_drafter.py --model M --drafter SEED-0 --drafter SEED-1 --prompts held-out.jsonl --compare

The acceptance length is the mean number of tokens per step, the target's own token included. The acceptance rate is accepted
draft tokens / proposed ones. Decoding is greedy, and each output is compared with plain greedy decoding. With --compare each
draft model is also served with the target's layers shifted, which is what a wrong layer id does, and with random weights.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click
import torch
from torch import Tensor
from training.acceptance import Acceptance
from training.comparison import compare, standard_error
from training.serving import AS_TRAINED, Serving, measured
from transformers import AutoTokenizer


@click.command(context_settings={"show_default": True})
@click.option("--model", required=True, help="The target: folder or hub id.")
@click.option("--drafter", "drafters", multiple=True, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--prompts", required=True, type=click.Path(exists=True, path_type=Path), help="JSONL with `messages`.")
@click.option("--limit", type=click.IntRange(1), help="Only the first prompts.")
@click.option("--max-new-tokens", default=64, type=click.IntRange(2))
@click.option(
    "--dtype", default="float32", type=click.Choice(["float32", "bfloat16"]), help="float32: outputs can be equal."
)
@click.option("--compare", "others", is_flag=True, help="Also serve shifted by --shift layers, and untrained.")
@click.option("--shift", "shifts", multiple=True, default=(-1, 1), type=int, help="Layers to shift by in --compare.")
@click.option("--processes", default=1, type=click.IntRange(1), help="Processes that share the prompts.")
def main(
    model: str, drafters: tuple[Path, ...], prompts: Path, limit: int | None, max_new_tokens: int, dtype: str, others: bool,
    shifts: tuple[int, ...], processes: int,
) -> None:  # fmt: skip
    """Print acceptance length and rate of each draft model, served each way, and the significance of the differences."""
    serving = Serving(model, dtype, drafters, shifts if others else None, max_new_tokens)
    asked = list(read_prompts(prompts, model, limit))
    found = measured(serving, asked, processes)
    with click.progressbar(found, length=len(asked), label="prompts", file=sys.stderr) as per_prompt:
        counts = list(per_prompt)
    for line in report({key: [count[key] for count in counts] for key in counts[0]}):
        click.echo(line)


def report(counts: Mapping[tuple[str, str], Sequence[Acceptance]]) -> Iterator[str]:
    """Yield the lines of {(way, drafter): a count per prompt}: what each took, then its gain as trained over each other way."""
    by_way = grouped(counts)
    for way, drafters in by_way.items():
        yield from (count_line(way, name, each) for name, each in drafters.items())
    trained = by_way.pop(AS_TRAINED)
    for way, drafters in by_way.items():
        yield from (difference_line(way, name, trained[name], each) for name, each in drafters.items())


def grouped(counts: Mapping[tuple[str, str], Sequence[Acceptance]]) -> dict[str, dict[str, Sequence[Acceptance]]]:
    """Return way -> drafter -> a count per prompt; add up several drafters, prompt by prompt, as one more."""
    by_way: dict[str, dict[str, Sequence[Acceptance]]] = {}
    for (way, drafter), each in counts.items():
        by_way.setdefault(way, {})[drafter] = each
    for drafters in by_way.values():
        if len(drafters) > 1:
            of_prompts = zip(*drafters.values(), strict=True)
            drafters[f"all {len(drafters)}"] = [sum(of_prompt, Acceptance()) for of_prompt in of_prompts]
    return by_way


def count_line(way: str, drafter: str, each: Sequence[Acceptance]) -> str:
    """Return the line of one drafter, served one way."""
    count = sum(each, Acceptance())
    return (
        f"{drafter} {way}: acceptance length {count.length:.3f} +- {standard_error(each):.3f} tokens per step "
        f"({count.tokens} tokens in {count.steps} steps), "
        f"acceptance rate {count.rate:.3f} ({count.taken} of {count.proposed} draft tokens), "
        f"output equal to plain greedy {count.equal} of {count.prompts} times"
    )


def difference_line(way: str, drafter: str, trained: Sequence[Acceptance], each: Sequence[Acceptance]) -> str:
    """Return the line of the gain as trained over another way, with its interval and sign test."""
    found = compare(trained, each)
    return (
        f"{drafter} {AS_TRAINED} less {way}: {found.difference:+.3f} (95 % interval {found.low:+.3f} to {found.high:+.3f}), "
        f"more on {found.better} prompts, less on {found.worse}, sign test p = {found.p_value:.1g}"
    )


def read_prompts(path: Path, model_name: str, limit: int | None) -> Iterator[Tensor]:
    """Yield (1, P) ids of each row's messages, with the generation prompt."""
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    for line in lines[:limit]:
        ids = tokenizer.apply_chat_template(json.loads(line)["messages"], add_generation_prompt=True, return_dict=True)
        yield torch.tensor([ids["input_ids"]])


if __name__ == "__main__":
    main()
