"""Dumps whose maker named the layers beside the ones that it took: `verify` says which layers they are, in every layout."""

import json
from pathlib import Path

import pytest

from hiddentap.capture.formats import ExportSettings, ImportSettings, export_dataset, import_dataset
from hiddentap.capture.verify import verify
from hiddentap.models.loading import ModelSource

RIGHT, WRONG = (1, 3, 4), (2, 4, 5)
# Layout, options of its export, options of its import, the field of its manifest that names the layers.
CASES = [
    ("specforge", {"algorithm": "eagle3"}, {}, None),
    ("speculators", {}, {"convention": "layer_output"}, None),
    ("deepspec", {}, {}, "target_layer_ids"),
    ("modelopt", {}, {}, None),
    ("automodel-dspark", {}, {}, "target_layer_ids"),
    ("automodel-eagle3", {"draft_vocab_size": 9}, {"first_token": 7}, "aux_layer_ids"),
    ("angelslim", {"algorithm": "dflash"}, {}, None),
]


def taken_over(
    files: Path, out: Path, layout: str, ids: tuple[int, ...], named_in: str | None, **options: object
) -> Path:
    """`files` imported under `ids`: by the manifest's word where the layout has one, else by the user's."""
    if named_in is None:
        options["layer_ids"] = ids
    else:
        path = files / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {named_in: list(ids)}))
    import_dataset(ImportSettings(files, layout, out, **options))
    return out


@pytest.mark.parametrize(("layout", "options", "more", "named_in"), CASES, ids=[layout for layout, *_ in CASES])
def test_layers_beside_the_named_ones_are_found_and_told(
    dump: Path, target: Path, tmp_path: Path, layout: str, options: dict, more: dict, named_in: str | None
) -> None:
    if layout == "speculators":
        pytest.importorskip("datasets")
    files, model = tmp_path / "files", ModelSource(str(target))
    export_dataset(ExportSettings(dump, layout, files, **options))
    for record in ("hiddentap-export.json", "hiddentap-export.sha256", "hiddentap-samples.jsonl"):
        (files / record).unlink()
    right = taken_over(files, tmp_path / "right", layout, RIGHT, named_in, model=str(target), **more)
    assert verify(right, model=model).ok
    wrong = taken_over(files, tmp_path / "wrong", layout, WRONG, named_in, model=str(target), **more)
    told = "\n".join(map(str, verify(wrong, model=model).faults()))
    for held, claimed in ((2, 3), (4, 5), (5, 6)):
        assert f"matches boundary {held}, not {claimed} as declared" in told
