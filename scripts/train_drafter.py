#!/usr/bin/env python3
"""Trains a block drafter from a capture alone; the target model is never loaded.

    hiddentap capture --model M --data chats.jsonl --layer-ids 1,14,26 --head --out OUT
    python scripts/train_drafter.py OUT --dest DRAFTER

The result is an ordinary folder of transformers' DFlash drafter class:

    drafter = AutoModel.from_pretrained("DRAFTER")
    model.generate(**prompt, assistant_model=drafter, speculation_type="dflash", do_sample=False)
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn
from training.blocks import block_states, make_blocks, possible_anchors, sample_anchors
from training.checkpoint import load_checkpoint, save_checkpoint
from training.context import channel_scale, context_rows, read_head, target_layer_ids
from training.curve import draw_curves, require_matplotlib
from training.drafter import Drafter, drafter_config, new_drafter
from training.loss import DraftLoss, draft_loss, softmax_ids
from training.packs import endless
from training.schedule import learning_rate
from transformers.utils import logging

from hiddentap import CapturedDataset
from hiddentap.capture.reading import PackedDataset, PackLoader, PostNorm, whole_column
from hiddentap.models.errors import HiddentapError

SCALE_PACKS = 4
CHECKPOINT = "training"
SAID_EVERY = 25


@dataclass(frozen=True)
class Recipe:
    """What a training is made with; a resumed one has the same."""

    layers: int
    block_size: int
    mask_token_id: int | None
    anchors: int
    pack_tokens: int
    steps: int
    lr: float
    decay: float
    state_loss: float
    softmax_ids: int
    precision: str
    seed: int


@dataclass
class History:
    """Points of the curve: a mean over the steps since the last point."""

    loss: list[tuple[int, float]] = field(default_factory=list)
    right: list[tuple[int, float]] = field(default_factory=list)


@click.command(context_settings={"show_default": True})
@click.argument("out", type=click.Path(exists=True, path_type=Path))
@click.option("--dest", type=click.Path(path_type=Path), required=True, help="Folder for the drafter.")
@click.option("--head", type=click.Path(exists=True, path_type=Path), help="[default: OUT/head]")
@click.option("--layers", default=2, type=click.IntRange(1), help="Decoder layers of the drafter.")
@click.option("--block-size", default=8, type=click.IntRange(2), help="Anchor and mask tokens of a block.")
@click.option("--mask-token-id", type=click.IntRange(0), help="[default: the smallest id that OUT does not hold]")
@click.option("--anchors", default=64, type=click.IntRange(1), help="Most anchors of a sequence in one step.")
@click.option("--pack-tokens", default=4096, type=click.IntRange(2), help="Most rows of a step.")
@click.option("--steps", default=1000, type=click.IntRange(1))
@click.option("--lr", default=1e-3, help="Highest learning rate.")
@click.option(
    "--decay", default=0.8, type=click.FloatRange(0, 1, min_open=True), help="Weight of each place to the last."
)
@click.option(
    "--state-loss", default=1.0, type=click.FloatRange(0), help="Weight of the distance to the target's states."
)
@click.option(
    "--softmax-ids", default=0, type=click.IntRange(0), help="Ids in a step's softmax: OUT's, random; 0: all."
)
@click.option("--precision", default="float32", type=click.Choice(["float32", "bfloat16"]))
@click.option("--seed", default=0, type=click.IntRange(0))
@click.option("--save-every", default=200, type=click.IntRange(1), help="Steps between checkpoints.")
@click.option("--resume", is_flag=True, help="Go on with the training in --dest.")
def main(out: Path, dest: Path, head: Path | None, save_every: int, resume: bool, **options: Any) -> None:
    """Train a drafter on the capture OUT."""
    require_matplotlib()
    logging.disable_progress_bar()
    if not resume and (dest / CHECKPOINT).exists():
        raise click.ClickException(f"{dest} holds a training; go on with it (--resume) or give another --dest.")
    try:
        training = Training(CapturedDataset(out), head or out / "head", Recipe(**options))
        if resume:
            training.resume(dest)
        training.run(dest, save_every)
    except HiddentapError as error:
        raise click.ClickException(str(error)) from error


class Training:
    """A drafter under training: what it reads, what it is, how far it has come."""

    def __init__(self, dataset: CapturedDataset, head: Path, recipe: Recipe) -> None:
        if not whole_column(dataset, "loss_mask").any():
            raise click.ClickException(f"{dataset.path} holds no supervised token to train on.")
        self.recipe = recipe
        self.head = read_head(head)
        self.lm_head = self.head.lm_head.to(getattr(torch, recipe.precision))
        post_norm = PostNorm(dataset, head) if recipe.state_loss else None
        # One window over the whole capture: with the default of 1,024 samples, the last 66 of 1,090, all from one source, came
        # together at each epoch's end, and the cross-entropy went from 4.0 to 5.1 there.
        window = max(len(dataset), 1)
        packs = PackedDataset(dataset, recipe.pack_tokens, seed=recipe.seed, window=window, post_norm=post_norm)
        self.packs = PackLoader(packs)
        self.occurring = occurring_ids(dataset)
        self.config = drafter_config(
            self.head.config,
            target_layer_ids(dataset),
            layers=recipe.layers,
            block_size=recipe.block_size,
            mask_token_id=mask_token(recipe.mask_token_id, self.occurring),
        )
        scale = channel_scale(list(islice(PackedDataset(dataset, recipe.pack_tokens), SCALE_PACKS)))
        self.drafter: Drafter = new_drafter(self.config, self.head, scale, recipe.seed)
        parameters = self.drafter.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
        self.history = History()
        self.done = 0

    def resume(self, dest: Path) -> None:
        """Go to the last checkpoint in `dest`; ClickException where it was made with another recipe."""
        numbers = load_checkpoint(dest / CHECKPOINT, self.drafter.model, self.optimizer)
        if numbers["recipe"] != asdict(self.recipe):
            raise click.ClickException(f"{dest} was trained with {numbers['recipe']}; resume it with the same options.")
        self.packs.load_state_dict(numbers["packs"])
        self.history = History(**numbers["history"])
        self.done = numbers["done"]

    def run(self, dest: Path, save_every: int) -> None:
        """Train to the last step, saving on the way."""
        click.echo(self.description())
        started, before, since = time.monotonic(), self.done, list[DraftLoss]()
        for pack in islice(endless(self.packs, possible_anchors), self.recipe.steps - self.done):
            since.append(self.step(pack))
            if self.done % SAID_EVERY == 0 or self.done == self.recipe.steps:
                self.say(since, (time.monotonic() - started) / (self.done - before))
                since.clear()
            if self.done % save_every == 0 or self.done == self.recipe.steps:
                self.save(dest)
        click.echo(f"{dest}: a drafter after {self.done} steps, {time.monotonic() - started:.0f} s")

    def step(self, pack: dict[str, Any]) -> DraftLoss:
        """One update on one pack."""
        self.drafter.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.recipe.lr, self.done, self.recipe.steps)
        loss = self.loss(pack)
        self.optimizer.zero_grad()
        torch.autograd.backward(loss.value)
        nn.utils.clip_grad_norm_(self.drafter.model.parameters(), 1.0)
        self.optimizer.step()
        self.done += 1
        return DraftLoss(loss.value.detach(), loss.cross_entropy.detach(), loss.right)

    def loss(self, pack: dict[str, Any]) -> DraftLoss:
        """The loss at anchors that depend on seed and step alone, so that a resumed training draws the same ones."""
        generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + self.done)
        anchors = sample_anchors(pack, self.recipe.anchors, generator)
        blocks = make_blocks(pack, anchors, self.config.block_size, self.config.mask_token_id)
        ids = softmax_ids(self.occurring, self.recipe.softmax_ids, len(self.lm_head), generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.recipe.precision == "bfloat16"):
            context = self.drafter.context(context_rows(pack))
            states = block_states(self.drafter.model, self.head.embeddings, context, blocks)
            goals = pack["post_norm"].float()[blocks.sources] if self.recipe.state_loss else None
            return draft_loss(
                states,
                self.lm_head,
                blocks.labels,
                self.recipe.decay,
                ids=ids,
                goals=goals,
                goal_weight=self.recipe.state_loss,
            )

    def save(self, dest: Path) -> None:
        """Write the drafter, the checkpoint and the curve."""
        self.drafter.save(dest)
        numbers = {
            "recipe": asdict(self.recipe),
            "packs": self.packs.state_dict(),
            "history": asdict(self.history),
            "done": self.done,
        }
        save_checkpoint(dest / CHECKPOINT, self.drafter.model, self.optimizer, numbers)
        panels = {
            "cross-entropy": {"train": self.history.loss},
            "first drafted token right": {"train": self.history.right},
        }
        draw_curves(dest / "curve.png", "drafter", panels)

    def say(self, since: list[DraftLoss], seconds: float) -> None:
        """Add a point to the curve and print it."""
        loss = sum(float(step.cross_entropy) for step in since) / len(since)
        right = torch.stack([step.right for step in since]).mean(0)
        self.history.loss.append((self.done, loss))
        self.history.right.append((self.done, float(right[0])))
        shares = " ".join(f"{share:.2f}" for share in right.tolist())
        click.echo(f"step {self.done:5d}  cross-entropy {loss:.3f}  right at each place {shares}  {seconds:.2f} s/step")

    def description(self) -> str:
        """Sizes, in one line."""
        parameters = sum(parameter.numel() for parameter in self.drafter.model.parameters())
        data = self.packs.packs.dataset
        return (
            f"{len(data)} samples, {int(data.lengths.sum()):,} rows, {len(self.occurring):,} distinct ids; drafter of "
            f"{parameters:,} parameters on layers {self.config.target_layer_ids}, mask token {self.config.mask_token_id}"
        )


def occurring_ids(dataset: CapturedDataset) -> Tensor:
    """The distinct token ids of a capture, ascending."""
    ids: Tensor = torch.unique(whole_column(dataset, "input_ids"))
    return ids.long()


def mask_token(given: int | None, occurring: Tensor) -> int:
    """The mask token's id: as given, or the smallest that does not occur."""
    if given is not None:
        return given
    ids = set(occurring.tolist())
    return next(i for i in range(len(ids) + 1) if i not in ids)


if __name__ == "__main__":
    main()
