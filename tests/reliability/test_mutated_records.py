"""Every JSON file that is read, each part of it of another kind in turn: it is read, or refused by an error of this package.

Files are written as somebody would write them: without a checksum, as the first release did, or with the right one.
"""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hiddentap import CapturedDataset
from hiddentap.capture.formats import ExportSettings, ImportSettings, export_dataset, import_dataset
from hiddentap.capture.reading import inspect_capture
from hiddentap.capture.report.survey import survey
from hiddentap.capture.store import OutputFolder, Plan
from hiddentap.capture.verify import verify
from hiddentap.models.checkpoint import check_files, fingerprint
from hiddentap.models.draft_config import DraftConfig, read_draft_config
from hiddentap.models.errors import HiddentapError
from hiddentap.models.head import load_head, load_head_config
from hiddentap.models.loading import ModelSource, load_config
from hiddentap.models.published_form import published_form
from hiddentap.models.readable_form import require_readable
from hiddentap.models.tokenizer_files import require_code_allowed
from support.captured import captured
from support.damage import as_earlier_release, change_header
from support.model_folder import llama_folder
from support.mutations import mutated

SHARD = "shards/shard-000000.safetensors"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the first release wrote it, with a reject and a head: no file but the shards vouches for itself."""
    place = tmp_path_factory.mktemp("mutated")
    folder = captured(llama_folder(place / "model"), place / "out", head=True, layer_ids=(0, 1, 2))
    as_earlier_release(folder)
    return folder


@pytest.fixture
def copied(out: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(out, tmp_path / "out"))


Some = Callable[[Iterator[tuple[str, Any]]], list[tuple[str, Any]]]


@pytest.fixture(params=[pytest.param(12, id="some"), pytest.param(10**6, id="all", marks=pytest.mark.slow)])
def some(request: pytest.FixtureRequest) -> Some:
    """Take so many of the changes, spread over all of them and the same in each run."""

    def taken(changes: Iterator[tuple[str, Any]]) -> list[tuple[str, Any]]:
        listed = list(changes)
        return random.Random(3).sample(listed, min(request.param, len(listed)))

    return taken


def strange(calls: dict[str, Callable[[], object]]) -> list[str]:
    """What the calls raised that is no error of this package."""
    found = []
    for name, call in calls.items():
        try:
            call()
        except HiddentapError:
            continue
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what is looked for
            found.append(f"{name}: {error!r}")
    return found


def readers(folder: Path, dest: Path) -> dict[str, Callable[[], object]]:
    def export() -> None:
        shutil.rmtree(dest, ignore_errors=True)
        export_dataset(ExportSettings(folder, "specforge", dest, algorithm="eagle3"))

    return {
        "read": lambda: CapturedDataset(folder, allow_incomplete=True)[0],
        "inspect": lambda: inspect_capture(folder),
        "verify": lambda: verify(folder, model="none"),
        "survey": lambda: survey(folder),
        "rejects": OutputFolder(folder).read_rejects,
        "plan": lambda: (Plan(folder / "plan").summary(), list(Plan(folder / "plan").rejects())),
        "export": export,
    }


def test_the_header_of_a_shard(some: Some, copied: Path, tmp_path: Path) -> None:
    path = copied / SHARD
    whole, manifest = path.read_bytes(), json.loads((copied / "manifest.json").read_text())
    kept: dict[str, Any] = {}
    change_header(path, kept.update)
    change_header(path, lambda record: kept.update(record))
    found = []
    for what, changed in some(mutated(kept["metadata"])):
        path.write_bytes(whole)
        change_header(path, lambda record, to=changed: record.update(metadata=to))
        manifest["shards"][0]["bytes"] = path.stat().st_size
        (copied / "manifest.json").write_text(json.dumps(manifest))
        found += [f"{what}: {error}" for error in strange(readers(copied, tmp_path / "dest"))]
    assert found == []


@pytest.mark.parametrize("name", ["manifest.json", "plan/plan.json", "head/head.json", "head/config.json"])
def test_a_record_of_the_folder(name: str, some: Some, copied: Path, tmp_path: Path) -> None:
    path, found = copied / name, []
    calls = readers(copied, tmp_path / "dest")
    calls |= {"head": lambda: load_head(copied / "head"), "config": lambda: load_head_config(copied / "head")}
    for what, changed in some(mutated(json.loads(path.read_text()))):
        path.write_text(json.dumps(changed))
        found += [f"{what}: {error}" for error in strange(calls)]
    assert found == []


@pytest.mark.parametrize(
    ("to", "options", "name"),
    [
        ("deepspec", {"shard_size": 2}, "manifest.json"),
        ("automodel-dspark", {"shard_size": 2, "seq_length": 80}, "manifest.json"),
        ("specforge", {"algorithm": "eagle3"}, "hiddentap-export.json"),
        ("specforge", {"algorithm": "eagle3"}, "hiddentap-samples.jsonl"),
    ],
)
def test_a_record_of_an_export(
    to: str, options: dict[str, Any], name: str, some: Some, copied: Path, tmp_path: Path
) -> None:
    dest, found = tmp_path / "dest", []
    export_dataset(ExportSettings(copied, to, dest, **options))
    path = dest / name

    def read_back() -> None:
        shutil.rmtree(tmp_path / "back", ignore_errors=True)
        import_dataset(ImportSettings(dest, to, tmp_path / "back"))

    first, *rest = path.read_text().splitlines() if name.endswith("l") else [path.read_text()]
    for what, changed in some(mutated(json.loads(first))):
        path.write_text("\n".join([json.dumps(changed), *rest]) + "\n")
        calls = {"import": read_back, "export": lambda: export_dataset(ExportSettings(copied, to, dest, **options))}
        found += [f"{what}: {error}" for error in strange({"import": calls["import"]})]
        if name == "hiddentap-export.json":
            found += [f"{what}: {error}" for error in strange({"export": calls["export"]})]
    assert found == []


def test_a_draft_config() -> None:
    config = {
        "model_type": "qwen3", "num_target_layers": 36, "num_hidden_layers": 1, "text_config": {"target_layer_ids": [1, 9]},
        "dflash_config": {"target_layer_ids": [1, 9], "num_target_layers": 36},
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 9], "use_aux_hidden_state": True},
    }  # fmt: skip

    def read(changed: Any) -> DraftConfig:
        return read_draft_config(changed)

    found = []
    for what, changed in mutated(config):
        calls: dict[str, Callable[[], object]] = {"read": lambda to=changed: read(to)}
        for system in ("vllm", "sglang", "layer_output"):
            calls[system] = lambda to=changed, of=system: read(to).boundaries(36, of)
        found += [f"{what}: {error}" for error in strange(calls)]
    assert found == []


def test_the_records_of_a_checkpoint(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    group = {"targets": ["Linear"], "weights": {"num_bits": 8}, "input_activations": None, "format": "int-quantized"}
    told = {
        "quant_method": "compressed-tensors", "weight_block_size": [128, 128], "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }  # fmt: skip

    def form() -> None:
        read = published_form(folder, load_config(ModelSource(str(folder))))
        require_readable(read, "m")
        _ = read.block_size, read.is_dequantized, read.rounds_activations, read.as_json(kept=False), str(read)

    found = []
    for what, changed in mutated({"quantization_config": told}):
        (folder / "config.json").write_text(json.dumps(config | changed))
        found += [f"config {what}: {error}" for error in strange({"form": form})]
    (folder / "config.json").write_text(json.dumps(config))
    index = {"metadata": {"total_size": 7}, "weight_map": {"lm_head.weight": "model.safetensors"}}
    for what, changed in mutated(index):
        (folder / "model.safetensors.index.json").write_text(json.dumps(changed))
        found += [f"index {what}: {error}" for error in strange({"files": lambda: check_files(folder)})]
    (folder / "tokenizer.json").unlink()

    def code() -> None:
        require_code_allowed(str(folder), None, trust_remote_code=False)

    for what, changed in mutated({"tokenizer_class": "X", "auto_map": {"AutoTokenizer": ["a.B", None]}}):
        (folder / "tokenizer_config.json").write_text(json.dumps(changed))
        found += [f"tokenizer {what}: {error}" for error in strange({"code": code})]
    assert found == []
    assert fingerprint(folder)
