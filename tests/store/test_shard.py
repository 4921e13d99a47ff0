"""The reader: what it gives back, and what it says of files that are not whole."""

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hiddentap.capture.store import Shard, ShardError
from hiddentap.models.errors import UsageError
from support.shards import raw_header, rows_of, write_shard

NAME = "shard-000000.safetensors"


def test_rows_and_samples_come_back_as_written(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / NAME, 3, 5, 2)
    rows = rows_of(10)
    assert (shard.M, shard.R, shard.nbytes) == (3, 10, (tmp_path / NAME).stat().st_size)
    assert shard.row_offsets.tolist() == [0, 2, 5, 10]
    assert [shard.row_range(j) for j in range(3)] == [(0, 2), (2, 5), (5, 10)]
    assert torch.equal(shard.rows("aux_hidden_states", 4, 7), rows["aux_hidden_states"][4:7])
    assert shard.rows("input_ids", 10, 10).shape == (0,)
    sample = shard.sample(1)
    assert sorted(sample) == ["aux_hidden_states", "input_ids", "loss_mask", "pre_norm"]
    assert sample["input_ids"].tolist() == [102, 103, 104]
    assert torch.equal(sample["pre_norm"], rows["pre_norm"][2:5])


def test_changing_what_was_read_changes_neither_the_file_nor_the_next_read(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / NAME, 3)
    before = (tmp_path / NAME).read_bytes()
    shard.rows("input_ids", 0, 3).fill_(-7)
    assert shard.rows("input_ids", 0, 3).tolist() == [100, 101, 102]
    assert (tmp_path / NAME).read_bytes() == before


def test_a_pickled_shard_reads_again_elsewhere_and_a_closed_one_too(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / NAME, 3, 4)
    copy = pickle.loads(pickle.dumps(shard))
    shard.close()
    assert copy.rows("input_ids", 2, 4).tolist() == [102, 103]
    assert shard.rows("input_ids", 2, 4).tolist() == [102, 103]
    assert copy.samples.id(1) == "s1"


def test_reads_outside_the_shard_are_refused(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / NAME, 3)
    with pytest.raises(UsageError, match="input_ids has entries 0:3, asked for 2:4"):
        shard.rows("input_ids", 2, 4)
    with pytest.raises(UsageError, match=r"has columns .* not 'row_offsets'"):
        shard.rows("row_offsets", 0, 1)
    with pytest.raises(IndexError, match=r"has samples 0\.\.0, got 1"):
        shard.sample(1)


def _truncate(data: bytes) -> bytes:
    return data[:-1]


def _extend(data: bytes) -> bytes:
    return data + b"\0"


def _unseal(data: bytes) -> bytes:
    return bytes(8) + data[8:]


def _cut_header(data: bytes) -> bytes:
    return data[:100]


def _text(data: bytes) -> bytes:
    return b"A line of text, and another one.\n" * 9


def _cut_length(data: bytes) -> bytes:
    return data[:5]


def _damage_json(data: bytes) -> bytes:
    return data[:8] + b"[" + data[9:]


def _flip_metadata(data: bytes) -> bytes:
    return data.replace(b'\\"model\\":\\"m\\"', b'\\"model\\":\\"n\\"')


def _empty(data: bytes) -> bytes:
    return b""


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, r"truncated: the header speaks of \d+ bytes and the file has \d+"),
        (_extend, "1 bytes too many after the last tensor"),
        (_unseal, "not sealed"),
        (_cut_header, "the header is cut"),
        (_text, "is no safetensors file"),
        (_cut_length, "5 bytes are too few"),
        (_empty, "0 bytes are too few"),
        (_damage_json, "the header is damaged"),
        (_flip_metadata, "the header was damaged or edited"),
    ],
)
def test_a_file_that_is_not_whole_is_refused_with_its_path_and_fault(
    tmp_path: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    path = tmp_path / NAME
    write_shard(path, 3, 5)
    whole = path.read_bytes()
    assert damage(whole) != whole
    path.write_bytes(damage(whole))
    with pytest.raises(ShardError, match=rf"shard-000000.safetensors: .*{message}"):
        Shard(path)


def test_a_missing_file_a_folder_and_a_file_of_others_are_refused(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ShardError, match=r"other.safetensors: .*not one of ours"):
        Shard(tmp_path / "other.safetensors")
    with pytest.raises(ShardError, match=r"none.safetensors: cannot be opened"):
        Shard(tmp_path / "none.safetensors")


def test_every_single_bit_flip_of_the_header_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / NAME
    write_shard(path, 2)
    whole = bytearray(path.read_bytes())
    _, start = raw_header(path)
    for place in range(start):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << (place % 8)
        path.write_bytes(flipped)
        with pytest.raises(ShardError):
            Shard(path)


def test_flipped_row_offsets_are_noticed_when_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / NAME
    write_shard(path, 2, 3)
    header, start = raw_header(path)
    data = bytearray(path.read_bytes())
    data[start + header["row_offsets"]["data_offsets"][0] + 8] ^= 1
    path.write_bytes(data)
    with pytest.raises(ShardError, match="row_offsets does not match its checksum"):
        _ = Shard(path).row_offsets


def test_a_file_cut_after_it_was_opened_is_an_error_and_no_crash(tmp_path: Path) -> None:
    path = tmp_path / NAME
    shard = write_shard(path, 200)
    os.truncate(path, 4096)
    with pytest.raises(ShardError, match="it changed since it was opened"):
        shard.sample(0)


def test_tensors_that_the_record_does_not_name_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / NAME
    write_shard(path, 2)
    header, start = raw_header(path)
    data = path.read_bytes()
    end = len(data) - start
    # Insert an unknown tensor at the end of the file, and forge the header's own checksum for it.
    header["zz_future"] = {"dtype": "U8", "shape": [3], "data_offsets": [end, end + 3]}
    raw = _with_checksum(header)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data[start:] + b"abc")
    shard = Shard(path)
    assert [column.name for column in shard.columns] == ["aux_hidden_states", "input_ids", "loss_mask", "pre_norm"]
    assert shard.sample(0)["input_ids"].tolist() == [100, 101]


def test_a_newer_format_is_refused_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / NAME
    write_shard(path, 2)
    header, start = raw_header(path)
    data = path.read_bytes()
    record = json.loads(header["__metadata__"]["hiddentap"])
    record["format_version"] = 2
    header["__metadata__"]["hiddentap"] = json.dumps(record, sort_keys=True, separators=(",", ":"))
    raw = _with_checksum(header)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data[start:])
    with pytest.raises(ShardError, match="format version 2, this release reads 1"):
        Shard(path)


def _with_checksum(header: dict[str, object]) -> bytes:
    """The header's bytes with the CRC-32 of themselves (that field as zeros) put in."""
    import re
    import zlib

    text = json.dumps(header, separators=(",", ":"))
    zeroed = re.sub(r'(\\"header_crc32\\":\\")[0-9a-f]{8}', r"\g<1>00000000", text, count=1)
    value = zlib.crc32(zeroed.encode())
    return re.sub(r'(\\"header_crc32\\":\\")0{8}', rf"\g<1>{value:08x}", zeroed, count=1).encode()
