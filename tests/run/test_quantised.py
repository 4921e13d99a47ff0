"""A checkpoint in 8 or 4 bits is captured as its own forward computes it."""

from pathlib import Path

import pytest

from hiddentap import CapturedDataset, CaptureSettings, ModelSource, capture_dataset
from support.model_folder import CHATS, write_rows
from support.quantised import quantised_llama
from support.recorder import equal, record


@pytest.mark.parametrize("bits", [8, 4])
def test_an_exact_run_holds_the_bits_of_the_quantised_model(bits: int, tmp_path: Path) -> None:
    model = quantised_llama(tmp_path, bits)
    source = ModelSource(str(tmp_path / "quantised"), device="cpu")
    data = write_rows(tmp_path / "rows.jsonl", CHATS)
    settings = CaptureSettings(source, (str(data),), tmp_path / "out", layer_ids=(0, 2), exact=True)

    assert capture_dataset(settings).captured == 5

    dataset = CapturedDataset(tmp_path / "out")
    for sample in (dataset[i] for i in range(5)):
        seen, _ = record(model, sample["input_ids"][None].long(), use_cache=False)
        for slot, layer in enumerate((0, 2)):
            expected = seen.of(f"model.layers.{layer}")[0].outputs[""][0]
            assert equal(sample["aux_hidden_states"][:, slot], expected)
        assert equal(sample["pre_norm"], seen.of("model.layers.3")[0].outputs[""][0])
