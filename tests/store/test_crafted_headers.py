"""Headers that somebody made: whatever they hold, a ShardError names the file, or the shard can be read."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from hiddentap.capture.store import Shard, ShardError
from support.damage import change_header, change_raw_header
from support.shards import write_shard

NAME = "shard-000000.safetensors"
ODD: tuple[Any, ...] = (None, -1, 2**70, 1e400, 0.5, "", "x", [], {}, [[]], True, "\ud800", [2**62, 2**62], "F32")


def read(path: Path) -> str:
    """What comes of reading all of a shard: "read", or the error's text."""
    try:
        with Shard(path) as shard:
            _ = shard.metadata, shard.checksums, shard.rejects
            for position in range(shard.M):
                shard.sample(position)
                shard.samples.id(position), shard.samples.source(position)
    except ShardError as error:
        return str(error)
    return "read"


@pytest.mark.parametrize("seed", range(4))
def test_any_value_in_any_place_of_a_header_is_a_shard_error(seed: int, tmp_path: Path) -> None:
    path, draw = tmp_path / NAME, random.Random(seed)
    write_shard(path, 3, 5, rejected=(1,))
    whole = path.read_bytes()
    seen = set()
    for _ in range(150):
        path.write_bytes(whole)
        change = change_header if draw.random() < 0.5 else change_raw_header
        change(path, lambda record: replace_somewhere(record, draw))
        seen.add(read(path))
    assert len(seen) > 10
    assert all(path.name in text for text in seen - {"read"})


def replace_somewhere(value: Any, draw: random.Random) -> None:
    """Put something odd in the place of one value at a random depth."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = draw.choice(keys)
        inner = value[key]
        if isinstance(inner, dict | list) and inner and draw.random() < 0.7:
            value = inner
            continue
        value[key] = draw.choice(ODD)
        return


def test_a_header_nested_beyond_the_parser_is_a_shard_error(tmp_path: Path) -> None:
    path = tmp_path / NAME
    deep = "[" * (sys.getrecursionlimit() * 50)
    raw = json.dumps({"x": 1})[:-1] + ', "y": ' + deep
    path.write_bytes(len(raw).to_bytes(8, "little") + raw.encode())
    with pytest.raises(ShardError, match="the header is damaged"):
        Shard(path)
