"""Models that put image features in the place of one placeholder themselves: hidden rows outnumber `input_ids`."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoProcessor

from hiddentap import CapturedDataset, TextSettings, capture_dataset, tap, with_capture
from hiddentap.hooks import TapError
from hiddentap.models.errors import RunError
from support import vision
from support.image_rows import asked, assert_rows, settings, states
from support.model_folder import write_rows
from support.vision import IMAGE

TEXT = "<|im_start|>user\n<|open|><|image|><|close|>?<|im_end|>\n<|im_start|>assistant\nNoise.<|im_end|>\n"


@pytest.fixture
def model(own_kimi: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(own_kimi, trust_remote_code=True).eval()


def processed(folder: Path, text: str, *names: Path) -> dict[str, torch.Tensor]:
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    return dict(processor(text=text, medias=[{"type": "image", "image": Image.open(name)} for name in names]))


def test_stored_rows_are_those_of_the_expanded_ids(
    own_kimi: Path, model: torch.nn.Module, pictures: Path, tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [asked("pictures/wide.png", "?", "Noise.")])
    assert capture_dataset(settings(own_kimi, data, tmp_path / "out")).captured == 1
    item, inputs = CapturedDataset(tmp_path / "out")[0], processed(own_kimi, TEXT, pictures / "wide.png")
    ids = inputs["input_ids"][0].tolist()
    at = ids.index(IMAGE)
    assert ids.count(IMAGE) == 1
    assert item["input_ids"].tolist() == ids[:at] + [IMAGE] * 6 + ids[at + 1 :]
    assert item["is_text"].tolist() == [1] * at + [0] * 6 + [1] * (len(ids) - at - 1)
    seen = states(model, inputs)
    assert seen["into 0"].shape[1] == len(ids) + 5
    assert_rows(item, seen)
    assert item["loss_mask"].tolist() == [0] * (len(item["input_ids"]) - 8) + [1] * 7 + [0]


def test_a_processor_that_belongs_to_other_code_than_the_model_is_refused(pictures: Path, tmp_path: Path) -> None:
    vision.own_kimi(
        tmp_path / "model", architecture="KimiK25ForConditionalGeneration"
    )  # as published: transformers' class is loaded
    data = write_rows(tmp_path / "rows.jsonl", [asked("pictures/wide.png", "?", "Noise.")])
    with pytest.raises(
        RunError, match=r"did not take what its processor made .*grid_thws.* may be of different releases"
    ):
        capture_dataset(settings(tmp_path / "model", data, tmp_path / "out"))


def test_a_cut_behind_the_image_leaves_one_placeholder_for_the_model(
    own_kimi: Path, model: torch.nn.Module, pictures: Path, tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [asked("pictures/wide.png", "?", "Noise.")])
    inputs = processed(own_kimi, TEXT, pictures / "wide.png")
    S = inputs["input_ids"].shape[1]
    capture_dataset(settings(own_kimi, data, tmp_path / "out", text=TextSettings(max_length=S + 5 - 4)))
    cut = inputs | {name: inputs[name][:, : S - 4] for name in ("input_ids", "attention_mask")}
    assert_rows(CapturedDataset(tmp_path / "out")[0], states(model, cut))


def test_the_mixin_gives_a_row_for_each_expanded_id(own_kimi: Path, model: torch.nn.Module, pictures: Path) -> None:
    files = (pictures / "wide.png", pictures / "tall.png")
    alone = [states(model, processed(own_kimi, "ab<|image|>cd", file)) for file in files]
    both = processed(own_kimi, "ab<|image|>cd", *files)
    both |= {name: both[name].repeat(2, 1) for name in ("input_ids", "attention_mask")}
    capturing = with_capture(model)
    capturing.set_dspark_layers_to_capture([0, 2])
    output = capturing(**both)
    a, b, c, d = both["input_ids"][0, [0, 1, 3, 4]].tolist()
    assert output.expanded_input_ids.tolist() == [[5, 5, a, b, *[IMAGE] * 6, c, d], [a, b, *[IMAGE] * 8, c, d]]
    assert output.is_text.tolist() == [[True] * 4 + [False] * 6 + [True] * 2, [True] * 2 + [False] * 8 + [True] * 2]
    made = output.auxiliary_device_output
    assert made.layout.row_counts == (10, 12)
    rows = made.columns["aux_hidden_states"]
    expected = [torch.stack([seen["into 1"][0], seen["into 3"][0]], 1) for seen in alone]
    assert torch.allclose(rows, torch.cat(expected), atol=1e-5, rtol=1e-5)


def test_a_tap_gives_them_too(own_kimi: Path, model: torch.nn.Module, pictures: Path) -> None:
    inputs = processed(own_kimi, "ab<|image|>cd", pictures / "wide.png")
    seen = states(model, inputs)
    with tap(model, [1]) as tapped:
        captured = tapped.run(**inputs)
    assert torch.equal(captured.rows()[:, 0], seen["into 2"][0])


def test_rows_that_are_not_those_of_the_expanded_ids_are_refused(
    own_kimi: Path, model: torch.nn.Module, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged = type(model).merged
    twice = lambda self, features, *rest: merged(self, [torch.cat([f, f]) for f in features], *rest)  # noqa: E731
    monkeypatch.setattr(type(model), "merged", twice)
    capturing = with_capture(model)
    capturing.set_dspark_layers_to_capture([0])
    with pytest.raises(TapError, match=r"gave a float32 tensor \(1, 16, 32\); expected a floating tensor \(1, 10, H\)"):
        capturing(**processed(own_kimi, "ab<|image|>cd", pictures / "wide.png"))
