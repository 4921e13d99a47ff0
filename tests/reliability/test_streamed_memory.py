"""A run with streamed weights holds two layers, what is outside the layers and the states of a block, however deep the model."""

from pathlib import Path

import pytest

from hiddentap.capture.run.engines.hugging_face.streamed import KEPT_STATES
from support.model_folder import VOCAB, llama_folder, write_rows
from support.streamed_peak import streamed_peaks

# float32: on a CPU without instructions for bfloat16, products of bfloat16 kept 15 MB of working memory of the kernels on top.
ITEMSIZE = 4
H, INTERMEDIATE, BLOCK = 1024, 3584, 256


def model_of(folder: Path, layers: int) -> Path:
    fields = {"hidden_size": H, "intermediate_size": INTERMEDIATE, "num_attention_heads": 8, "num_key_value_heads": 4}
    return llama_folder(folder, num_hidden_layers=layers, **fields)


@pytest.mark.slow
def test_the_peak_is_that_of_two_layers_whatever_the_depth(tmp_path: Path) -> None:
    rows = [{"id": f"s{i}", "input_ids": [1 + (i + j) % 250 for j in range(32)]} for i in range(3 * BLOCK // 32)]
    data, small = write_rows(tmp_path / "rows.jsonl", rows), llama_folder(tmp_path / "small")
    # The deepest first: nothing that a shallower one left behind can be of use to it.
    models = [model_of(tmp_path / f"model-{layers}", layers) for layers in (16, 8, 4)]
    peaks = streamed_peaks(small, models, data, tmp_path / "out", BLOCK)
    layer = ITEMSIZE * (2 * H * H + 2 * (H // 2) * H + 3 * INTERMEDIATE * H + 2 * H)
    states = BLOCK * H * ITEMSIZE * (2 + 1 + KEPT_STATES)  # two taps, the pre-norm, and the states on the way
    outside = ITEMSIZE * (VOCAB * H + H)
    told = ", ".join(f"{peak / 1e6:.1f}" for peak in peaks)
    assert max(peaks) <= 1.1 * (2 * layer + states + outside), f"{told} MB; a layer is {layer / 1e6:.1f} MB"
    assert max(peaks) - min(peaks) < 0.1 * 2 * layer, told
