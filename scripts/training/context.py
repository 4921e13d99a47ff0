"""What a drafter is given of the target: the captured layers, and how large each of their channels is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from hiddentap import CapturedDataset
from hiddentap.models.head import load_head

SMALLEST = 1e-3


def context_rows(pack: dict[str, Any]) -> Tensor:
    """(T, K * H) float32: the captured states of each row side by side."""
    states: Tensor = pack["aux_hidden_states"]
    return states.float().flatten(1)


def target_layer_ids(dataset: CapturedDataset) -> list[int]:
    """The captured layers as transformers' drafters count them: id i is the output of 0-based layer i.

    Raises ClickException for a capture that does not name them, for the embeddings, which are no layer's output, and for the
    last layer, which transformers serves after the final norm and a capture holds before it.
    """
    taps = dataset.description.taps
    if taps is None:
        raise click.ClickException(f"{dataset.path} does not say which layers it holds; capture or import it again.")
    n, boundaries = taps.n, list(taps.boundaries)
    if not boundaries or boundaries[0] == 0 or boundaries[-1] == n:
        raise click.ClickException(
            f"a drafter wants outputs of layers 0 to {n - 2} (layer_output ids), this capture holds boundaries {boundaries} of "
            f"{n} layers. transformers serves the last layer's output after the final norm. Capture other --layer-ids."
        )
    return [boundary - 1 for boundary in boundaries]


@dataclass(frozen=True)
class TargetHead:
    """What a drafter borrows of its target.

    Attributes:
        embeddings: ids to (..., H). lm_head: (V, H) float32. norm: the final norm, None where there is none.
        config: the target's text config.
    """

    embeddings: nn.Embedding
    lm_head: Tensor
    norm: nn.Module | None
    config: Any


def read_head(folder: Path) -> TargetHead:
    """Read a head folder; ClickException where embeddings or lm_head are missing or not plain."""
    head = load_head(folder)
    if not isinstance(head.embeddings, nn.Embedding) or not isinstance(head.lm_head, nn.Linear):
        raise click.ClickException(f"{folder} must hold embeddings and an lm_head; it has {head}.")
    if hasattr(head.embeddings, "embed_norm"):
        raise click.ClickException(
            "embeddings with a norm of their own are not supported: drafters are served without it."
        )
    config = AutoConfig.from_pretrained(folder).get_text_config()
    return TargetHead(head.embeddings, head.lm_head.weight.float(), head.norm, config)


def channel_scale(packs: list[dict[str, Any]]) -> Tensor:
    """(K * H,) the median size of each channel.

    The residual stream has a few channels hundreds of times larger than the rest, and rows (the first of a sample) that are
    larger still; the median does not see the rows.
    """
    rows = torch.cat([context_rows(pack)[pack["position_ids"] > 0] for pack in packs])
    return rows.abs().median(0).values.clamp(min=SMALLEST)
