"""A run with streamed weights holds two layers, what is outside the layers and the states of a block, however deep the model."""

from pathlib import Path

import pytest
import torch

from hiddentap.capture.run.engines.hugging_face.streamed import KEPT_STATES
from support import tiny
from support.long_tests import takes_many_minutes
from support.model_folder import VOCAB, llama_folder, model_folder, write_rows
from support.streamed_peak import streamed_peak

H, INTERMEDIATE, BLOCK = 1024, 3584, 2048


def model_of(folder: Path, layers: int) -> Path:
    fields = {"hidden_size": H, "intermediate_size": INTERMEDIATE, "num_attention_heads": 8, "num_key_value_heads": 4}
    model = tiny.build_llama(num_hidden_layers=layers, vocab_size=VOCAB, pad_token_id=None, **fields)
    return model_folder(folder, model.to(torch.bfloat16))


@takes_many_minutes
@pytest.mark.slow
def test_the_peak_is_that_of_two_layers_whatever_the_depth(tmp_path: Path) -> None:
    rows = [{"id": f"s{i}", "input_ids": [1 + (i + j) % 250 for j in range(32)]} for i in range(3 * BLOCK // 32)]
    data, small = write_rows(tmp_path / "rows.jsonl", rows), llama_folder(tmp_path / "small")
    peaks = []
    for layers in (4, 8, 16):
        model = model_of(tmp_path / f"model-{layers}", layers)
        peaks.append(streamed_peak(small, model, data, tmp_path / f"out-{layers}", BLOCK))
    layer = 2 * (2 * H * H + 2 * (H // 2) * H + 3 * INTERMEDIATE * H + 2 * H)
    states = BLOCK * H * 2 * (2 + 1 + KEPT_STATES)  # two taps, the pre-norm, and the states on the way
    outside = 2 * (VOCAB * H + H)
    told = ", ".join(f"{peak / 1e6:.1f}" for peak in peaks)
    assert max(peaks) <= 1.1 * (2 * layer + states + outside), f"{told} MB; a layer is {layer / 1e6:.1f} MB"
    assert max(peaks) - min(peaks) < 0.1 * 2 * layer, told
