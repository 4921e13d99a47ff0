"""Files that rot, one at a time: what is right stays, what is wrong is proved wrong by two witnesses before it goes."""

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from hiddentap import CapturedDataset
from hiddentap.capture.formats import ExportSettings, export_dataset
from hiddentap.capture.store import FolderLockedError, NewerFormatError, OutputFolder, ShardError
from hiddentap.capture.verify import verify
from hiddentap.models.errors import HiddentapError, RunError, UsageError
from support.captured import FIRST, SECOND, captured
from support.damage import as_earlier_release, change_header, change_record, flip_bit
from support.model_folder import llama_folder


@pytest.fixture(scope="module")
def good(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return captured(llama, tmp_path_factory.mktemp("good") / "out", exact=True, head=True, layer_ids=(0, 1, 2))


def again(llama: Path, good: Path, out: Path, **fields: object) -> None:
    """The capture that made `good`, on `out`."""
    captured(llama, out, data=good.with_suffix(".jsonl"), exact=True, head=True, layer_ids=(0, 1, 2), **fields)


def tree(out: Path) -> dict[str, bytes]:
    files = (
        path for path in out.rglob("*") if path.is_file() and path.name not in (".hiddentap-lock", "repairs.jsonl")
    )
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


def written(out: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (out / "shards").iterdir()}


def flip_text(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert data.count(old) == 1, (path, old)
    path.write_bytes(data.replace(old, new))


def flip_shard_rows(out: Path) -> None:
    path = out / "plan/plan.json"
    before, found, after = path.read_bytes().rpartition(b'"shard_rows": 200')  # the identity has one of its own
    path.write_bytes(before + found.replace(b"2", b"3") + after)


def flip_identity(out: Path) -> None:
    flip_text(out / "plan/plan.json", b'"store_dtype": "float32"', b'"store_dtype": "float16"')


def flip_source(out: Path) -> None:
    flip_text(out / "plan/plan.json", b'.jsonl"', b'.jsonm"')


def flip_tokens(out: Path) -> None:
    flip_bit(out / "plan/input_ids.safetensors", "input_ids", byte=40)


def flip_mask(out: Path) -> None:
    flip_bit(out / "plan/loss_mask.safetensors", "loss_mask", byte=30)


def flip_names(out: Path) -> None:
    flip_bit(out / "plan/sample_ids.safetensors", "sample_ids", byte=3)


def cut_plan(out: Path) -> None:
    os.truncate(out / "plan/lengths.safetensors", 260)


def lose_plan_file(out: Path) -> None:
    (out / "plan/lengths.safetensors").unlink()


def lose_plan(out: Path) -> None:
    shutil.rmtree(out / "plan")


OF_THE_SUMMARY = [flip_shard_rows, flip_identity, flip_source]
OF_THE_PLAN = [*OF_THE_SUMMARY, flip_tokens, flip_mask, flip_names, cut_plan, lose_plan_file, lose_plan]


@pytest.mark.parametrize("missing", [(), (SECOND,)])
@pytest.mark.parametrize("rot", OF_THE_PLAN)
def test_a_rotten_plan_is_made_again_from_the_data_and_no_shard_that_agrees_is_touched(
    rot: Callable[[Path], None], missing: tuple[str, ...], llama: Path, good: Path, out: Path
) -> None:
    rot(out)
    for name in missing:
        (out / "shards" / name).unlink()
    before = written(out)
    again(llama, good, out)
    assert tree(out) == tree(good)
    assert before.items() <= written(out).items()


@pytest.mark.parametrize("rot", OF_THE_SUMMARY)
def test_a_rotten_plan_of_an_earlier_release_is_outvoted_by_its_shards(
    rot: Callable[[Path], None], llama: Path, good: Path, out: Path
) -> None:
    as_earlier_release(out)
    rot(out)
    before = written(out)
    assert not verify(out, repair=True).repaired
    assert written(out) == before
    again(llama, good, out)
    assert (out / "plan/plan.json").read_bytes() == (good / "plan/plan.json").read_bytes()
    assert before.items() <= written(out).items()


def test_a_folder_of_an_earlier_release_opens_resumes_and_is_verified(llama: Path, good: Path, out: Path) -> None:
    as_earlier_release(out)
    assert verify(out).ok
    assert len(CapturedDataset(out)) == 6
    (out / "shards" / SECOND).unlink()
    before = written(out)
    again(llama, good, out)
    assert (out / "shards" / SECOND).read_bytes() == (good / "shards" / SECOND).read_bytes()
    assert before.items() <= written(out).items()


@pytest.mark.parametrize("rot", OF_THE_PLAN)
def test_a_repair_under_a_rotten_plan_removes_nothing_and_says_what_to_do(
    rot: Callable[[Path], None], out: Path
) -> None:
    rot(out)
    flip_bit(out / "shards" / SECOND, "pre_norm")
    before = tree(out)
    with pytest.raises(UsageError, match=r"cannot be repaired: shards are made again from the plan of a capture"):
        verify(out, repair=True)
    assert tree(out) == before


def test_where_plan_and_data_both_contradict_a_shard_nothing_goes(
    llama: Path, good: Path, out: Path, tmp_path: Path
) -> None:
    stranger = captured(llama, tmp_path / "stranger", exact=True, head=True, layer_ids=(0, 1, 2), shard_rows=150)
    (out / "shards" / SECOND).write_bytes((stranger / "shards" / SECOND).read_bytes())
    (out / "manifest.json").unlink()  # it would side with the plan
    before = tree(out)
    with pytest.raises(HiddentapError, match=SECOND):
        again(llama, good, out)
    assert tree(out) == before


def test_other_data_under_a_rotten_plan_is_refused_and_nothing_goes(llama: Path, good: Path, out: Path) -> None:
    flip_tokens(out)
    data = out.with_suffix(".jsonl")
    data.write_text(good.with_suffix(".jsonl").read_text().replace("How far", "How fat"))
    before = tree(out)
    with pytest.raises(UsageError, match=r"is of another run.*What differs"):
        captured(llama, out, data=data, exact=True, head=True, layer_ids=(0, 1, 2))
    assert tree(out) == before


def test_a_shard_of_a_later_release_stops_every_command_and_stays(llama: Path, good: Path, out: Path) -> None:
    def later(record: dict) -> None:
        record["format_version"] = 2

    change_header(out / "shards" / SECOND, later)
    before = tree(out)
    for work in (
        lambda: verify(out, repair=True),
        lambda: again(llama, good, out),
        lambda: CapturedDataset(out),
        lambda: export_dataset(ExportSettings(out, "deepspec", out.with_name("dest"))),
    ):
        with pytest.raises(NewerFormatError, match=rf"{SECOND}: format version 2, this release reads 1"):
            work()
    assert tree(out) == before


def rot_weights(model: Path) -> None:
    """The highest bit of an exponent in the middle of a large matrix: no sample of a tensor's ends sees it."""
    flip_bit_of(model / "model.safetensors", "model.layers.1.mlp.gate_proj.weight", 2051, 0x40)


def flip_bit_of(path: Path, tensor: str, byte: int, mask: int) -> None:
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    start, stop = json.loads(data[8 : 8 + length])[tensor]["data_offsets"]
    assert 1024 < byte < stop - start - 1024
    data[8 + length + start + byte] ^= mask
    path.write_bytes(data)


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    return llama_folder(tmp_path / "wide", intermediate_size=64)


def test_rotten_weights_remove_no_shard_whose_own_checksums_hold(wide: Path, tmp_path: Path) -> None:
    out = captured(wide, tmp_path / "out", exact=True)
    rot_weights(wide)
    before = tree(out)
    report = verify(out, repair=True)
    assert not report.ok
    assert report.repaired == ()
    assert any("model.safetensors has checksum" in note for note in (*report.notes, *(f.what for f in report.findings)))
    assert tree(out) == before


def test_no_shard_is_made_from_weights_that_rotted_since_the_first_was(wide: Path, tmp_path: Path) -> None:
    out = captured(wide, tmp_path / "out", exact=True)
    (out / "shards" / SECOND).unlink()
    rot_weights(wide)
    before = tree(out)
    with pytest.raises(RunError, match=r"weights in .*wide are not those .*model.safetensors has checksum"):
        captured(wide, out, data=out.with_suffix(".jsonl"), exact=True)
    assert tree(out)[f"shards/{FIRST}"] == before[f"shards/{FIRST}"]
    assert not (out / "shards" / SECOND).exists()


HEAD_ROTS = {
    "norm": lambda out: flip_bit(out / "head/head.safetensors", "norm.weight", byte=7),
    "lm_head": lambda out: flip_bit(out / "head/head.safetensors", "lm_head.weight", byte=9),
    "config": lambda out: flip_text(out / "head/config.json", b'"rms_norm_eps": 1e-06', b'"rms_norm_eps": 1e-02'),
    "description": lambda out: flip_text(out / "head/head.json", b'"model.norm"', b'"model.nory"'),
}


@pytest.mark.parametrize("rot", HEAD_ROTS)
def test_a_rotten_head_is_named_blamed_on_no_shard_and_written_again(
    rot: str, llama: Path, good: Path, out: Path
) -> None:
    HEAD_ROTS[rot](out)
    before = written(out)
    report = verify(out, repair=True)
    assert report.repaired == ()
    assert [Path(finding.path).name for finding in report.findings] == ["head"]
    assert ("changed on disk" in report.findings[0].what) or ("damaged" in report.findings[0].what)
    with pytest.raises(HiddentapError, match=r"head"):
        export_dataset(ExportSettings(out, "automodel-eagle3", out.with_name("dest"), seq_length=128))
    again(llama, good, out)
    assert tree(out) == tree(good)
    assert written(out) == before


@pytest.mark.parametrize("column", ["aux_hidden_states", "input_ids", "loss_mask", "post_norm"])
def test_rotten_rows_are_not_exported(column: str, out: Path) -> None:
    flip_bit(out / "shards" / SECOND, column)
    with pytest.raises(ShardError, match=rf"{SECOND}: {column} of sample '\w+' does not match its checksum"):
        export_dataset(ExportSettings(out, "deepspec", out.with_name("dest")))


def drop_entry(record: dict) -> None:
    entry = record["shards"].pop()
    record["counts"] |= {
        "captured": record["counts"]["captured"] - entry["samples"],
        "rows": record["counts"]["rows"] - entry["rows"],
    }


@pytest.mark.parametrize("guarded", [True, False])
def test_a_shard_that_the_manifest_does_not_list_is_missed(guarded: bool, out: Path) -> None:
    change_record(out / "manifest.json", drop_entry)
    if not guarded:
        as_earlier_release(out)
    assert not verify(out, model="none").ok
    for read in (lambda: CapturedDataset(out), lambda: export_dataset(ExportSettings(out, "deepspec", out / "dest"))):
        with pytest.raises(RunError, match=r"manifest.json: it says 2 shards and lists 1"):
            read()


def test_rejects_and_counts_are_held_against_plan_and_shards(llama: Path, tmp_path: Path) -> None:
    rows = [{"id": f"s{i}", "input_ids": list(range(8, 40))} for i in range(4)] + [{"id": "bad", "nothing": 1}]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = captured(llama, tmp_path / "out", data=data, exact=True)
    assert verify(out, model="none").ok
    path = out / "rejects.jsonl"
    whole = path.read_bytes()
    for changed in (whole.replace(b'"line":5', b'"line":4'), b"", whole * 2):
        path.write_bytes(changed)
        for guarded in (True, False):
            if not guarded:
                as_earlier_release(out)
            assert [Path(found.path).name for found in verify(out, model="none").findings] == ["rejects.jsonl"]
    path.write_bytes(whole)
    change_record(out / "manifest.json", lambda record: record["counts"].update(rejected=0))
    assert [Path(found.path).name for found in verify(out, model="none").findings] == ["manifest.json"]


def test_a_head_has_the_mode_that_the_umask_leaves(llama: Path, good: Path, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        out = captured(llama, tmp_path / "out", data=good.with_suffix(".jsonl"), head=True)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in out.rglob("*") if path.is_file()}
    assert set(modes.values()) == {0o600}, modes


def test_a_lock_that_is_a_link_is_refused_by_capture_and_export(
    llama: Path, good: Path, out: Path, tmp_path: Path
) -> None:
    target = tmp_path / "thesis.txt"
    target.write_text("years of work")
    (out / ".hiddentap-lock").unlink()
    (out / ".hiddentap-lock").symlink_to(target)
    with pytest.raises(UsageError, match=r"\.hiddentap-lock is a link to"):
        again(llama, good, out)
    dest = tmp_path / "dest"
    dest.mkdir()
    (dest / ".hiddentap-lock").symlink_to(target)
    with pytest.raises(UsageError, match=r"\.hiddentap-lock is a link to"):
        export_dataset(ExportSettings(good, "deepspec", dest))
    assert target.read_text() == "years of work"


def test_an_export_killed_before_its_first_record_was_whole_goes_on(good: Path, tmp_path: Path) -> None:
    dest = tmp_path / "dest"
    dest.mkdir()
    (dest / "hiddentap-export.json.tmp").write_bytes(b'{"export')
    (dest / ".hiddentap-lock").touch()
    assert export_dataset(ExportSettings(good, "deepspec", dest)).samples == 6
    (dest / "mine.txt").touch()


def test_a_pipe_in_a_shards_place_is_made_again_and_nothing_waits(llama: Path, good: Path, out: Path) -> None:
    (out / "shards" / SECOND).unlink()
    os.mkfifo(out / "shards" / SECOND)
    assert not verify(out, model="none").ok
    again(llama, good, out)
    assert tree(out) == tree(good)


def test_a_repair_waits_for_nobody(out: Path) -> None:
    flip_bit(out / "shards" / SECOND, "pre_norm")
    with OutputFolder(out).lock(), pytest.raises(FolderLockedError):
        verify(out, repair=True)
