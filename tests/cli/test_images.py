"""Images through the command line."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from hiddentap import CapturedDataset
from support import vision
from support.image_rows import asked, located
from support.model_folder import chat, write_rows


def test_capture_and_verify_take_conversations_with_images(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    model = vision.gemma3(tmp_path / "model")
    vision.picture(tmp_path / "pictures", "wide.png", 24, 16)
    row = asked("pictures/wide.png", "\nWhat is it?", "Noise.", id="one")
    data, out = write_rows(tmp_path / "rows.jsonl", [row, chat("Is it?", "No.")]), tmp_path / "out"
    given = (
        "--model",
        tmp_path / "model",
        "--data",
        data,
        "--out",
        out,
        "--layer-ids",
        "1",
        "--exact",
        "--final",
        "none",
    )
    code, said, _ = run("capture", *given, "--dry-run")
    assert (code, out.exists()) == (0, False)
    code, said, _ = run("capture", *given)
    assert code == 0
    assert "2 captured, 0 rejected" in said
    processor = AutoProcessor.from_pretrained(tmp_path / "model")
    inputs = processor.apply_chat_template(
        located(row["messages"], tmp_path), tokenize=True, return_dict=True, return_tensors="pt"
    )
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        hidden = plain(**inputs, output_hidden_states=True).hidden_states
    assert torch.equal(CapturedDataset(out)[0]["aux_hidden_states"][:, 0], hidden[2][0])
    assert model.config.image_token_id == vision.SOFT
    code, said, _ = run("verify", out, "--model", tmp_path / "model")
    assert code == 0
    assert "1 sample(s) with images were not compared" in said
