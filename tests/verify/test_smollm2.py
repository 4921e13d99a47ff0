"""A real model in half precision, batched: clean as captured, and named where a layer is another."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hiddentap import TextSettings
from hiddentap.capture.verify import verify
from support.captured import captured
from support.damage import Columns, rewrite

pytestmark = pytest.mark.smollm2

DATA = Path(__file__).parent.parent / "data" / "conversations.jsonl"


def test_a_neighbouring_layer_is_told_from_rounding(smollm2_folder: Path, tmp_path: Path) -> None:
    settings = {"text": TextSettings(limit=6, max_length=128), "batch_tokens": 512, "shard_rows": 4096, "head": True}
    out = captured(smollm2_folder, tmp_path / "out", data=DATA, layer_ids=(1, 14, 26), **settings)
    clean = verify(out, samples=3)
    assert clean.ok, str(clean)
    assert clean.compared == 3

    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.bfloat16).eval().float()

    def neighbour(columns: Columns) -> None:
        # Of a float32 forward: what a batch would give, give or take its rounding.
        with torch.no_grad():
            hs = model(columns["input_ids"][None].long(), output_hidden_states=True, use_cache=False).hidden_states
        columns["aux_hidden_states"][:, 1] = hs[14][0]

    rewrite(out, neighbour)
    report = verify(out, samples=3)
    assert {finding.what for finding in report.findings} == {
        "stored layer 14 matches boundary 14, not 15 as declared in 3 compared samples"
    }
