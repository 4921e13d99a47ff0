"""Folders of every kind: grown by a generation, without their model, of two runs, unfinished, none at all."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hiddentap import ModelSource
from hiddentap.capture.store import GrowingShardWriter, Manifest, OutputFolder, capture_columns, generation_columns
from hiddentap.capture.verify import verify
from hiddentap.models.errors import UsageError
from support import tiny
from support.captured import LAYERS, captured, plain_states
from support.damage import Columns, change_identity, change_record, rewrite
from support.model_folder import VOCAB, llama_folder, model_folder, write_rows


@pytest.fixture(scope="module")
def good(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return captured(llama, tmp_path_factory.mktemp("good") / "out", exact=True)


def grown(
    good: Path, llama: Path, out: Path, *, noise: float = 0.0, output_ids: tuple[int, ...] = (-1, -1, 40, 41)
) -> Path:
    """A generation of two tokens from a prompt of three, in a growing shard and a folder without a plan."""
    model = AutoModelForCausalLM.from_pretrained(llama).eval()
    ids = torch.tensor([72, 73, 74, 40], dtype=torch.int32)
    states = [state + noise * torch.randn_like(state) * state.norm() / 32 for state in plain_states(model, ids)]
    metadata = OutputFolder(good).sealed_shards().shards[0].metadata
    folder = OutputFolder(out)
    columns = (*capture_columns(3, 32, torch.float32, pre_norm=True), *generation_columns())
    with folder.lock(), GrowingShardWriter(folder.shard_path(0), columns, metadata) as writer:
        rows = {
            "aux_hidden_states": torch.stack([states[layer + 1] for layer in LAYERS], 1),
            "pre_norm": states[4],
            "input_ids": ids,
            "loss_mask": torch.tensor([0, 0, 0, 1], dtype=torch.uint8),
            "output_ids": torch.tensor(output_ids, dtype=torch.int32),
        }
        for index, name in enumerate("ab"):
            writer.append(writer.begin(index, name), rows)
        shard = writer.seal()
        Manifest.from_shards({}, {}, [shard], complete=True).write(folder.manifest_path)
    return out


def test_a_generation_is_compared_by_its_inputs(good, llama, tmp_path: Path) -> None:
    report = verify(grown(good, llama, tmp_path / "out"))
    assert report.ok, str(report)
    assert (report.compared, report.rows) == (2, 8)


def test_a_generation_is_never_asked_for_bits(good, llama, tmp_path: Path) -> None:
    # The header says "exact", and cached steps round otherwise than one forward does.
    assert verify(grown(good, llama, tmp_path / "out", noise=1e-7)).ok
    assert not verify(grown(good, llama, tmp_path / "worse", noise=1e-3)).ok


def test_sampled_tokens_that_are_not_the_next_inputs_are_found(good, llama, tmp_path: Path) -> None:
    found = verify(grown(good, llama, tmp_path / "out", output_ids=(-1, 7, 40, 41))).findings
    assert [(finding.sample_id, finding.tensor, finding.what) for finding in found] == [
        ("a", "output_ids", "is not the input of the next row at 1 tokens, first at token 1"),
        ("b", "output_ids", "is not the input of the next row at 1 tokens, first at token 1"),
    ]


def test_without_its_model_a_folder_is_checked_and_the_report_says_what_was_not(good: Path, out: Path) -> None:
    rewrite(out, metadata=lambda metadata: metadata["model"].update(id="nowhere/at-all"))
    change_identity(out, lambda identity: identity["model"].update(id="nowhere/at-all"))
    report = verify(out)
    assert report.ok, str(report)
    assert report.notes == (
        "no sample was compared with a model: nowhere/at-all is not on this machine; name its place with --model",
    )


def test_a_model_that_changed_since_is_told_and_not_used(good: Path, tmp_path: Path) -> None:
    changing = llama_folder(tmp_path / "model")
    out = captured(changing, tmp_path / "out")
    llama_folder(changing, seed=9)
    report = verify(out)
    assert [finding.severity for finding in report.findings] == ["warning"]
    assert report.findings[0].what.startswith(f"the weight files of {changing} are not those of the captured model (")
    assert report.compared == 0
    assert "is not what was captured" in report.notes[0]


def test_the_same_weights_in_another_place_are_taken(good: Path, llama: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(llama, tmp_path / "moved"))
    assert verify(good, model=moved).ok
    assert verify(good, model=ModelSource(str(moved))).compared == 6


def test_a_model_that_cannot_be_loaded_is_wrong_use_where_it_was_named(good: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be loaded as a model"):
        verify(good, model=tmp_path / "nowhere")


def test_no_samples_load_no_model(good: Path, tmp_path: Path) -> None:
    report = verify(good, model=tmp_path / "nowhere", samples=0)
    assert (report.ok, report.compared, report.notes) == (True, 0, ("no sample was compared with a model",))


def test_a_padding_id_among_the_tokens_has_a_row_of_zeros_at_the_embeddings_alone(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", tiny.build_llama(vocab_size=VOCAB, pad_token_id=40))
    rows = write_rows(tmp_path / "rows.jsonl", [{"id": "s0", "input_ids": [72, 73, 40, 74, 75]}])
    out = captured(model, tmp_path / "out", data=rows, layer_ids=(0, 2), convention="boundary", exact=True)
    report = verify(out)
    assert report.ok, str(report)

    def put_zeros(columns: Columns) -> None:
        assert not columns["aux_hidden_states"][2, 0].any()
        columns["aux_hidden_states"][1, 1] = 0

    rewrite(out, put_zeros, sample="s0")
    found = [finding.what for finding in verify(out).findings]
    assert [what for what in found if "zero" in what] == [
        "all-zero rows in 1 of its tokens, first at token 1 at slot 1"
    ]


def test_a_shard_of_another_run_is_found(out: Path) -> None:
    rewrite(out, index=1, metadata=lambda metadata: metadata.update(store_dtype="float16"))
    found = verify(out, samples=0).findings
    assert [(Path(finding.path).name, finding.what) for finding in found] == [
        (
            "shard-000001.safetensors",
            'its header is of another run than the folder: store_dtype: "float32" -> "float16"',
        )
    ]


def test_a_manifest_of_another_run_is_found(out: Path) -> None:
    change_record(out / "manifest.json", lambda record: record["identity"]["taps"].update(boundaries=[0, 1, 3]))
    found = verify(out, samples=0).findings
    assert [(Path(finding.path).name, finding.what) for finding in found] == [
        ("manifest.json", "it is of another run than the plan: taps.boundaries: [1, 2, 4] -> [0, 1, 3]")
    ]


def without_second(record: dict) -> None:
    first = record["shards"][0]
    counts = record["counts"] | {"captured": first["samples"], "rows": first["rows"]}
    record.update(complete=False, shards=[first], counts=counts)


def test_an_unfinished_capture_is_told_as_such_and_what_is_there_is_compared(out: Path) -> None:
    (out / "shards/shard-000001.safetensors").unlink()
    change_record(out / "manifest.json", without_second)
    report = verify(out)
    assert {finding.severity for finding in report.findings} == {"warning"}
    assert report.compared == 3


def test_layers_read_by_an_adapter_of_several_streams_are_not_compared_and_the_norm_states_are(out: Path) -> None:
    change_identity(out, lambda identity: identity["taps"].update(adapter="hyper_connections.mean"))
    rewrite(
        out,
        lambda columns: columns["aux_hidden_states"].mul_(2),
        metadata=lambda metadata: metadata["taps"].update(adapter="hyper_connections.mean"),
    )
    report = verify(out)
    assert report.ok, str(report)
    assert [agreement.tap for agreement in report.agreement] == ["pre-norm", "post-norm"]
    assert report.notes == (
        "layer 0, layer 1, layer 3 were not compared: adapter hyper_connections.mean reads what no plain forward shows",
    )


@pytest.mark.parametrize("samples", [-1])
def test_wrong_use_is_told(samples: int, good: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="samples must be at least 0; got -1"):
        verify(good, samples=samples)
    with pytest.raises(UsageError, match="holds no captured shards"):
        verify(tmp_path)


def test_a_report_can_be_read_and_joins_what_differs_in_the_shard_alone(out: Path) -> None:
    rewrite(out, lambda columns: columns.update(pre_norm=columns["post_norm"].clone()))
    text = str(verify(out))
    assert "files: 2 shards, 6 samples, 372 rows" in text
    assert "layer 1: boundary 2: all rows bit-equal, row error median 0.0e+00, largest 0.0e+00" in text
    assert (
        "error: shards/shard-000000.safetensors, shards/shard-000001.safetensors: pre_norm: "
        "post-norm stored as pre-norm in 3 compared samples"
    ) in text.splitlines()
