"""A real model's folder: nothing about it is unusual."""

from pathlib import Path

import pytest

from hiddentap import CaptureSettings, ModelSource, TextSettings, capture_dataset
from hiddentap.capture.report import notices, survey

CONVERSATIONS = Path(__file__).parents[1] / "data/conversations.jsonl"


@pytest.mark.smollm2
def test_a_real_capture_with_its_massive_first_tokens_is_nothing_unusual(smollm2_folder: Path, tmp_path: Path) -> None:
    settings = CaptureSettings(
        model=ModelSource(str(smollm2_folder)), data=(str(CONVERSATIONS),), out=tmp_path / "out",
        layer_ids=(0, 1, 14, 26, 28, 29), final="both", text=TextSettings(limit=6),
    )  # fmt: skip
    capture_dataset(settings)
    seen = survey(tmp_path / "out")
    assert notices(seen) == []
    middle = seen.profile.states[2]
    assert middle.norms[seen.profile.first].min() > 50 * middle.norms[~seen.profile.first].max()
