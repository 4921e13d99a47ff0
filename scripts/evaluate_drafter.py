#!/usr/bin/env python3
"""Measures drafters: tokens per step that the target accepts on held-out prompts, through transformers' own generate().

    python scripts/evaluate_drafter.py --model M --drafter DRAFTER --prompts held-out.jsonl --compare

Greedy decoding; each output is compared with plain greedy decoding, token by token. With --compare each drafter is also served
with the target's layers shifted by one (what a mistaken layer id does) and, for the floor, with random weights in its place.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from training.acceptance import Acceptance, accepted, plain_greedy
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


@click.command(context_settings={"show_default": True})
@click.option("--model", "model_name", required=True, help="The target: folder or hub id.")
@click.option("--drafter", "folders", multiple=True, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--prompts", required=True, type=click.Path(exists=True, path_type=Path), help="JSONL with `messages`.")
@click.option("--limit", type=click.IntRange(1), help="Only the first prompts.")
@click.option("--max-new-tokens", default=64, type=click.IntRange(2))
@click.option(
    "--dtype", default="float32", type=click.Choice(["float32", "bfloat16"]), help="float32: outputs can be equal."
)
@click.option("--compare", is_flag=True, help="Also serve shifted by one layer, and untrained.")
@click.option("--shift", default=-1, type=int, help="Layers to shift by in --compare.")
def main(
    model_name: str, folders: tuple[Path, ...], prompts: Path, limit: int | None, max_new_tokens: int, dtype: str, compare: bool,
    shift: int,
) -> None:  # fmt: skip
    """Print one line per drafter and way of serving it."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=getattr(torch, dtype)).eval()
    served = {
        f"{folder.name} {way}": drafter
        for seed, folder in enumerate(folders)
        for way, drafter in ways(load_drafter(folder, model.dtype), compare, shift, seed)
    }
    counts = dict.fromkeys(served, Acceptance())
    with click.progressbar(list(read_prompts(prompts, model_name, limit)), label="prompts", file=sys.stderr) as asked:
        for prompt in asked:
            plain = plain_greedy(model, prompt, max_new_tokens)
            for name, drafter in served.items():
                counts[name] += accepted(model, drafter, prompt, plain, max_new_tokens)
    for name, count in counts.items():
        click.echo(
            f"{name:<28} {count.length:.3f} tokens per step ({count.tokens} tokens in {count.steps} steps), "
            f"output equal to plain greedy on {count.equal} of {count.prompts} prompts"
        )


def load_drafter(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModel.from_pretrained(folder, dtype=dtype).eval()


def ways(drafter: Any, compare: bool, shift: int, seed: int) -> Iterator[tuple[str, Any]]:
    """The drafter as trained and, where asked for, shifted and untrained."""
    yield "as trained", drafter
    if compare:
        yield f"layers {shift:+d}", shifted(drafter, shift)
        yield "untrained", untrained(drafter, seed)


def shifted(drafter: Any, shift: int) -> Any:
    """The same weights, given the states of other layers."""
    other = deepcopy(drafter)
    other.config.target_layer_ids = [layer + shift for layer in drafter.config.target_layer_ids]
    return other


def untrained(drafter: Any, seed: int) -> Any:
    """The same class and sizes with random weights."""
    torch.manual_seed(seed)
    return type(drafter)(drafter.config).to(drafter.dtype).eval()


def read_prompts(path: Path, model_name: str, limit: int | None) -> Iterator[Tensor]:
    """(1, P) ids of each row's messages, with the header of the answer."""
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    for line in lines[:limit]:
        ids = tokenizer.apply_chat_template(json.loads(line)["messages"], add_generation_prompt=True, return_dict=True)
        yield torch.tensor([ids["input_ids"]])


if __name__ == "__main__":
    main()
