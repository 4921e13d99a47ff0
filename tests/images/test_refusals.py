"""What becomes of images that cannot be captured, and of image files that change."""

import json
from pathlib import Path

import pytest

from hiddentap import TextSettings, capture_dataset
from hiddentap.models.errors import UsageError
from support import vision
from support.image_rows import asked, settings
from support.model_folder import chat, llama_folder, write_rows


def rejects(out: Path) -> list[tuple[str, str]]:
    lines = [json.loads(line) for line in (out / "rejects.jsonl").read_text().splitlines()]
    return [(line["detail"]["code"], line["reason"]) for line in lines]


def test_images_that_are_not_to_be_had_are_rejected_with_a_reason(gemma3: Path, pictures: Path, tmp_path: Path) -> None:
    (pictures / "broken.png").write_bytes((pictures / "wide.png").read_bytes()[:200])
    nameless = asked("x", "?", "No.")
    del nameless["messages"][0]["content"][0]["image"]
    by_assistant = asked(pictures / "wide.png", "?", "No.")
    by_assistant["messages"][1]["content"] = [{"type": "image", "image": "x"}]
    rows = [
        asked("https://example.org/a.png", "?", "No."),
        asked("pictures/none.png", "?", "No."),
        asked("pictures/broken.png", "?", "No."),
        nameless,
        by_assistant,
        asked("pictures/wide.png", "<|image|>?", "No."),
        chat("Is it?", "No."),
    ]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    summary = capture_dataset(settings(gemma3, data, tmp_path / "out", text=TextSettings(allow_rejects=True)))
    assert (summary.captured, summary.rejected) == (1, 6)
    codes, reasons = zip(*rejects(tmp_path / "out"), strict=True)
    assert codes == ("image_not_local", "bad_image", "bad_image", "bad_content", "bad_content", "images_refused")
    assert "found 'https://example.org/a.png'; fetch it first" in reasons[0]
    assert "pictures/none.png" in reasons[1]
    assert "to name its file once; found none" in reasons[3]


def test_rows_with_images_are_refused_with_streamed_weights(gemma3: Path, pictures: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [asked("pictures/wide.png", "?", "No.")])
    with pytest.raises(UsageError, match=r"need a model in memory: with stream_weights .* takes text alone"):
        capture_dataset(settings(gemma3, data, tmp_path / "out", stream_weights=True))


def test_a_text_model_rejects_the_row(pictures: Path, tmp_path: Path) -> None:
    llama = llama_folder(tmp_path / "model")
    data = write_rows(tmp_path / "rows.jsonl", [asked("pictures/wide.png", "?", "No."), chat("Is it?", "No.")])
    summary = capture_dataset(settings(llama, data, tmp_path / "out", text=TextSettings(allow_rejects=True)))
    assert (summary.captured, summary.rejected) == (1, 1)
    ((code, reason),) = rejects(tmp_path / "out")
    assert code == "bad_content"
    assert reason.endswith("found a part of 'image', and the model has no image processor")


# "<|im_start|>user\n" and the frame's opening are 7 tokens, so the 6 features are tokens 7 to 12.
@pytest.mark.parametrize(("length", "captured"), [(7, 1), (8, 0), (12, 0), (13, 1)])
def test_a_cut_through_an_image_rejects_the_row(
    qwen3_vl: Path, pictures: Path, tmp_path: Path, length: int, captured: int
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [asked("pictures/wide.png", "?", "No."), chat("Is it?", "No.")])
    text = TextSettings(max_length=length, loss_on="all", allow_rejects=True)
    summary = capture_dataset(settings(qwen3_vl, data, tmp_path / "out", text=text))
    assert summary.captured == 1 + captured
    expected = (
        f"expected whole images among the first {length} tokens; found image 0 at tokens 7..12; raise --max-length"
    )
    assert rejects(tmp_path / "out") == ([] if captured else [("image_cut", expected)])


def test_a_changed_image_is_refused_by_name(gemma3: Path, pictures: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [asked("pictures/wide.png", "?", "No.", id="a")])
    run = settings(gemma3, data, tmp_path / "out")
    assert capture_dataset(run).captured == 1
    assert capture_dataset(run).shards_done_before == 1
    vision.picture(pictures, "wide.png", 24, 16, seed=9)
    with pytest.raises(UsageError, match=r"wide\.png of sample 'a' is not the image any more that it was"):
        capture_dataset(run)


def test_an_image_that_changes_between_plan_and_forward_ends_the_run(
    gemma3: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hiddentap.capture.run import offline
    from hiddentap.models.errors import RunError

    prepare = offline.prepare_folder

    def changing(*given: object) -> object:
        plan = prepare(*given)
        vision.picture(pictures, "wide.png", 24, 16, seed=9)
        return plan

    monkeypatch.setattr(offline, "prepare_folder", changing)
    data = write_rows(tmp_path / "rows.jsonl", [asked("pictures/wide.png", "?", "No.", id="a")])
    with pytest.raises(
        RunError, match=r"sample 'a': .*wide\.png is not the image any more that the run was planned with"
    ):
        capture_dataset(settings(gemma3, data, tmp_path / "out"))
