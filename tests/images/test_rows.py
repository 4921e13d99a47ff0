"""Rows of conversations with images, beside plain forwards of what the processor makes of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from hiddentap import CapturedDataset, TextSettings, capture_dataset
from hiddentap.capture.store import check_folder
from support.image_rows import asked, assert_rows, located, settings, states
from support.model_folder import chat, write_rows
from support.vision import IMAGE, SOFT

# The id in whose place features stand, and how many features the two pictures of `pictures` have.
FEATURES = {"qwen3_vl": (IMAGE, 6, 8), "gemma3": (SOFT, 4, 4), "kimi_k25": (IMAGE, 6, 8)}


def two_pictures() -> dict[str, Any]:
    row = asked("pictures/wide.png", "\nand ", "Both are noise.", id="two")
    row["messages"][0]["content"] += [{"type": "image", "path": "pictures/tall.png"}, {"type": "text", "text": "?"}]
    return row


def rows() -> list[dict[str, Any]]:
    one = asked("pictures/wide.png", "\nWhat is it?", "Noise.", id="one")
    return [one, chat("Is it?", "No.", id="text"), two_pictures(), chat("What then?", "You are there.", id="more")]


def processed(model: Path, row: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    """What the processor itself makes of a row."""
    processor = AutoProcessor.from_pretrained(model, trust_remote_code=True)
    form = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    return dict(processor.apply_chat_template(located(row["messages"], folder), **form))


@pytest.mark.parametrize("name", FEATURES)
def test_exact_rows_are_those_of_a_plain_forward_of_the_processors_output(
    name: str, request: pytest.FixtureRequest, pictures: Path, tmp_path: Path
) -> None:
    folder: Path = request.getfixturevalue(name)
    token, wide, tall = FEATURES[name]
    data = write_rows(tmp_path / "rows.jsonl", rows())
    summary = capture_dataset(settings(folder, data, tmp_path / "out", text=TextSettings(loss_on="all")))
    assert (summary.captured, summary.rejected) == (4, 0)
    dataset, model = CapturedDataset(tmp_path / "out"), AutoModelForImageTextToText.from_pretrained(folder).eval()
    for item, row, placed in zip((dataset[i] for i in range(4)), rows(), (wide, 0, wide + tall, 0), strict=True):
        inputs = processed(folder, row, tmp_path)
        assert item["input_ids"].tolist() == inputs["input_ids"][0].tolist()
        assert_rows(item, states(model, inputs))
        assert (item["is_text"] == 0).tolist() == (inputs["input_ids"][0] == token).tolist()
        assert int((item["is_text"] == 0).sum()) == placed
        assert torch.equal(item["loss_mask"], item["is_text"])
    assert check_folder(tmp_path / "out") == []


def test_a_batched_run_supervises_the_answers_and_gives_the_rows_within_rounding(
    qwen3_vl: Path, pictures: Path, tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", rows())
    capture_dataset(settings(qwen3_vl, data, tmp_path / "out", exact=False, batch_tokens=512))
    dataset, model = CapturedDataset(tmp_path / "out"), AutoModelForImageTextToText.from_pretrained(qwen3_vl).eval()
    answers = ("Noise.", "No.", "Both are noise.", "You are there.")
    for item, row, answer in zip((dataset[i] for i in range(4)), rows(), answers, strict=True):
        seen = states(model, processed(qwen3_vl, row, tmp_path))
        assert torch.allclose(item["pre_norm"], seen["pre_norm"][0], atol=1e-5, rtol=1e-5)
        # One token a byte; the end-of-turn mark is one more, and a newline ends the text.
        assert item["loss_mask"].tolist()[-len(answer) - 2 :] == [1] * (len(answer) + 1) + [0]
        assert int(item["loss_mask"].sum()) == len(answer) + 1


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_a_cut_behind_an_image_keeps_that_image_alone(
    name: str, request: pytest.FixtureRequest, pictures: Path, tmp_path: Path
) -> None:
    folder: Path = request.getfixturevalue(name)
    row = asked("pictures/wide.png", "?", "It is noise.", id="cut")
    row["messages"] += asked("pictures/tall.png", "?", "It is too.")["messages"]
    whole = processed(folder, row, tmp_path)
    text = "".join(AutoProcessor.from_pretrained(folder, trust_remote_code=True).batch_decode(whole["input_ids"]))
    assert text.count("It is") == 2
    first = processed(folder, {"messages": row["messages"][:2]}, tmp_path)
    S = first["input_ids"].shape[1] - 3
    data = write_rows(tmp_path / "rows.jsonl", [row])
    capture_dataset(settings(folder, data, tmp_path / "out", text=TextSettings(max_length=S)))
    item = CapturedDataset(tmp_path / "out")[0]
    cut = {k: v[:, :S] if v.shape == first["input_ids"].shape else v for k, v in first.items()}
    assert item["input_ids"].tolist() == cut["input_ids"][0].tolist()
    assert_rows(item, states(AutoModelForImageTextToText.from_pretrained(folder).eval(), cut))


def test_a_run_without_images_holds_no_trace_of_them(qwen3_vl: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [chat("Is it?", "No.")])
    capture_dataset(settings(qwen3_vl, data, tmp_path / "out"))
    assert "is_text" not in CapturedDataset(tmp_path / "out")[0]
    assert not [path for path in (tmp_path / "out").rglob("*") if "image" in path.name]
