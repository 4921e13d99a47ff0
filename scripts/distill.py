#!/usr/bin/env python3
"""Distils a small student from a capture alone: next-token distributions, and hidden states layer by layer.

    hiddentap capture --model M --data chats.jsonl --layer-ids 1,14,27 --head --top-logits 16 --out OUT
    python scripts/distill.py OUT --held-out HELD_OUT --dest STUDENT

Two students start from the same weights and see the same packs for as many steps: one learns the distributions alone, one the
hidden states too. The held-out perplexity of both is printed and drawn. With several --seed, each makes a pair of its own, and
what is drawn is the mean.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.nn import functional
from training.context import channel_scale
from training.curve import draw_curves, require_matplotlib
from training.packs import endless
from training.schedule import learning_rate
from training.student import Student, answered_rows, state_distance, student_config, top_k_divergence
from transformers import AutoConfig
from transformers.utils import logging

from hiddentap import CapturedDataset
from hiddentap.capture.reading import PackedDataset, PackLoader
from hiddentap.models.errors import HiddentapError

SCALE_PACKS = 4
TOP = ("topk_logits", "topk_ids", "topk_logsumexp")


@dataclass(frozen=True)
class Recipe:
    """What a training is made with."""

    hidden_size: int
    layers: int
    pack_tokens: int
    steps: int
    lr: float
    state_loss: float
    evaluate_every: int


@dataclass
class Curves:
    """(step, value) points of one student."""

    divergence: list[tuple[int, float]] = field(default_factory=list)
    distance: list[tuple[int, float]] = field(default_factory=list)
    perplexity: list[tuple[int, float]] = field(default_factory=list)


@click.command(context_settings={"show_default": True})
@click.argument("out", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--held-out", required=True, type=click.Path(exists=True, path_type=Path), help="A capture to measure on."
)
@click.option("--dest", required=True, type=click.Path(path_type=Path), help="Folder for the students and the curve.")
@click.option("--head", type=click.Path(exists=True, path_type=Path), help="[default: OUT/head]")
@click.option("--hidden-size", default=128, type=click.IntRange(32), help="Width of the student, a multiple of 32.")
@click.option("--layers", default=4, type=click.IntRange(1))
@click.option("--pack-tokens", default=2048, type=click.IntRange(2), help="Most rows of a step.")
@click.option("--steps", default=400, type=click.IntRange(1))
@click.option("--lr", default=2e-3, help="Highest learning rate.")
@click.option("--state-loss", default=1.0, type=click.FloatRange(0, min_open=True), help="Weight of the hidden states.")
@click.option("--evaluate-every", default=50, type=click.IntRange(1), help="Steps between held-out perplexities.")
@click.option(
    "--seed", "seeds", default=(0,), multiple=True, type=click.IntRange(0), help="Any number; a pair for each."
)
def main(out: Path, held_out: Path, dest: Path, head: Path | None, seeds: tuple[int, ...], **options: Any) -> None:
    """Distil from the capture OUT, which holds a head (--head) and top logits (--top-logits)."""
    require_matplotlib()
    logging.disable_progress_bar()
    recipe = Recipe(**options)
    if recipe.hidden_size % 32:
        raise click.UsageError("--hidden-size must be a multiple of 32, the width of a head.")
    try:
        data, measured = with_top_logits(out), CapturedDataset(held_out)
        target = AutoConfig.from_pretrained(head or out / "head").get_text_config()
        curves = {
            name: [distil(data, measured, target, recipe, weight, seed, dest / f"seed-{seed}" / name) for seed in seeds]
            for name, weight in (("distributions", 0.0), ("distributions-and-states", recipe.state_loss))
        }
    except HiddentapError as error:
        raise click.ClickException(str(error)) from error
    draw_curves(dest / "curve.png", f"student, mean over seeds {', '.join(map(str, seeds))}", panels(curves))
    for name, of_seeds in curves.items():
        last = [curve.perplexity[-1][1] for curve in of_seeds]
        each = f" (seeds: {', '.join(f'{value:.1f}' for value in last)})" if len(seeds) > 1 else ""
        click.echo(f"{name:<26} held-out perplexity {fmean(last):.1f}{each} after {recipe.steps} steps")


def with_top_logits(out: Path) -> CapturedDataset:
    """The capture; ClickException where it lacks what the students learn from."""
    dataset = CapturedDataset(out)
    missing = sorted({*TOP, "aux_hidden_states"} - dataset[0].keys()) if len(dataset) else ["samples"]
    if missing:
        raise click.ClickException(f"{out} lacks {', '.join(missing)}; capture with --layer-ids and --top-logits 16.")
    return dataset


def distil(
    data: CapturedDataset,
    held_out: CapturedDataset,
    target: Any,
    recipe: Recipe,
    state_loss: float,
    seed: int,
    dest: Path,
) -> Curves:
    """Train one student, save it, and return how it went."""
    K, H = data[0]["aux_hidden_states"].shape[1:]
    torch.manual_seed(seed)
    student = Student(student_config(target, recipe.hidden_size, recipe.layers), K, H)
    optimizer = torch.optim.AdamW(student.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    scale = channel_scale(list(islice(PackedDataset(data, recipe.pack_tokens), SCALE_PACKS)))
    packs = PackLoader(PackedDataset(data, recipe.pack_tokens, seed=seed))
    curves, started = Curves(), time.monotonic()
    for step, pack in enumerate(islice(endless(packs, answered_rows), recipe.steps)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe.lr, step, recipe.steps)
        divergence, distance = losses(student, pack, scale)
        optimizer.zero_grad()
        torch.autograd.backward(divergence + state_loss * distance)
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        curves.divergence.append((step + 1, divergence.item()))
        curves.distance.append((step + 1, distance.item()))
        if (step + 1) % recipe.evaluate_every == 0 or step + 1 == recipe.steps:
            curves.perplexity.append((step + 1, perplexity(student, PackedDataset(held_out, recipe.pack_tokens))))
            say(dest.name, curves, (time.monotonic() - started) / (step + 1))
    student.model.save_pretrained(dest)
    return curves


def losses(student: Student, pack: dict[str, Any], scale: Tensor) -> tuple[Tensor, Tensor]:
    """What the pack costs: the divergence on answered rows, the distance of the states."""
    answered = answered_rows(pack)
    logits, states = student(pack, answered)
    divergence = top_k_divergence(logits, {name: pack[name][answered] for name in TOP})
    return divergence, state_distance(states, pack, scale)


@torch.no_grad()
def perplexity(student: Student, packs: Iterable[dict[str, Any]]) -> float:
    """Of the supervised tokens of `packs`, each given those before it."""
    total, count = 0.0, 0
    for pack in packs:
        answered = answered_rows(pack)
        logits, _ = student(pack, answered)
        total += float(functional.cross_entropy(logits, pack["input_ids"][answered + 1], reduction="sum"))
        count += len(answered)
    return math.exp(total / count)


def say(name: str, curves: Curves, seconds: float) -> None:
    """The last point of each curve."""
    (step, divergence), distance = curves.divergence[-1], curves.distance[-1][1]
    click.echo(
        f"{name:<26} step {step:5d}  divergence {divergence:.3f}  distance {distance:.3f}  "
        f"held-out perplexity {curves.perplexity[-1][1]:.1f}  {seconds:.2f} s/step"
    )


def panels(curves: dict[str, list[Curves]]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """One panel per quantity, one line per student: the mean over its seeds."""
    return {
        "top-k divergence": {name: mean(curve.divergence for curve in of) for name, of in curves.items()},
        "distance of states": {name: mean(curve.distance for curve in of) for name, of in curves.items()},
        "held-out perplexity": {name: mean(curve.perplexity for curve in of) for name, of in curves.items()},
    }


def mean(lines: Iterable[list[tuple[int, float]]]) -> list[tuple[int, float]]:
    """Of (step, value) points at the same steps."""
    return [(points[0][0], fmean(value for _, value in points)) for points in zip(*lines, strict=True)]


if __name__ == "__main__":
    main()
