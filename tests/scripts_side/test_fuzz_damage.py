"""A few draws of the fuzz of damaged folders; the script runs thousands."""

from pathlib import Path

import pytest
from fuzz_damage import Bench, draws

pytestmark = pytest.mark.slow


def test_a_bit_flipped_anywhere_loses_no_good_shard_writes_nothing_wrong_and_is_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = 7  # fixed, so that a run of the suite says the same each time; the script draws others
    with capsys.disabled():
        print(f"\nfuzz_damage seed {seed}")  # noqa: T201 - to run it again
    found = list(draws(Bench(tmp_path), seed, 12))
    assert [(str(one), one.faults, one.seen) for one in found if one.faults] == []
    assert any(one.seen for one in found)
