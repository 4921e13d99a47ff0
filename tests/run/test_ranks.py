"""One run on several processes, as torchrun starts them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hiddentap import CapturedDataset, CaptureSettings, ModelSource, capture_dataset
from hiddentap.capture.run.ranks import RankError, Ranks
from hiddentap.models.errors import RunError
from support.model_folder import chat, write_rows

pytestmark = pytest.mark.slow

MANY = [chat("q" * (i % 7), "a" * (5 + i % 11), id=f"s{i}") for i in range(80)]
ROWS = 400


def torchrun(processes: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, "-m", "hiddentap", *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_two_processes_fill_the_same_folder_byte_for_byte_as_one(llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "many.jsonl", MANY)
    options = ["--model", llama, "--data", data, "--layer-ids", "0,2", "--exact", "--shard-rows", ROWS]
    done = torchrun(2, "capture", *options, "--out", tmp_path / "two")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("80 captured, 0 rejected") == 1
    one = CaptureSettings(
        ModelSource(str(llama)), (str(data),), tmp_path / "one", layer_ids=(0, 2), exact=True, shard_rows=ROWS
    )
    capture_dataset(one)
    shards = sorted((tmp_path / "one/shards").iterdir())
    assert len(shards) > 4
    for shard in shards:
        assert shard.read_bytes() == (tmp_path / "two/shards" / shard.name).read_bytes()
    manifests = [json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("one", "two")]
    assert manifests[0] == manifests[1]
    assert len(CapturedDataset(tmp_path / "two")) == 80


def test_an_error_of_the_first_rank_ends_all(llama: Path, tmp_path: Path) -> None:
    done = torchrun(
        2, "capture", "--model", llama, "--data", tmp_path / "no.jsonl", "--layer-ids", "0", "--out", tmp_path / "o"
    )
    assert done.returncode != 0
    assert "no.jsonl" in done.stderr


def test_a_process_of_its_own_is_alone_and_takes_every_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    ranks = Ranks.of_environment()
    assert (ranks.rank, ranks.size, ranks.is_first) == (0, 1, True)
    assert list(ranks.take([4, 7])) == [4, 7]
    ranks.meet("anywhere", lambda: None)
    assert ranks.agreed("anything", lambda: {"one": 1}, lambda: None) == {"one": 1}


def test_two_runs_of_one_process_do_not_meet_each_others_ranks(tmp_path: Path) -> None:
    from torch.distributed import HashStore, PrefixStore

    store = HashStore()
    first = [Ranks(rank, 2, rank, PrefixStore("run 0", store)) for rank in range(2)]
    second = [Ranks(rank, 2, rank, PrefixStore("run 1", store)) for rank in range(2)]
    assert [next(ranks.take([4, 7])) for ranks in first] == [4, 7]
    assert [next(ranks.take([4, 7])) for ranks in second] == [4, 7]


def test_a_rank_that_waits_is_told_of_anothers_failure() -> None:
    from torch.distributed import HashStore

    store = HashStore()
    first, second = (Ranks(rank, 2, rank, store) for rank in range(2))

    def fails() -> None:
        with first.failing_together():
            raise RunError("the disk is gone")

    with pytest.raises(RunError, match="the disk is gone"):
        fails()
    with pytest.raises(RankError, match="another process of this run failed: rank 0: the disk is gone"):
        second.meet("the end", lambda: None)


def test_what_the_first_rank_makes_is_what_every_rank_goes_by() -> None:
    from torch.distributed import HashStore

    store = HashStore()
    first, second = (Ranks(rank, 2, rank, store) for rank in range(2))
    made = {"left": [3, 5], "claim": "a"}
    assert first.agreed("work", lambda: made, lambda: None) == made

    def never() -> dict[str, object]:
        raise AssertionError("the second rank makes nothing")

    assert second.agreed("work", never, lambda: None) == made


def test_of_several_failures_the_first_is_told() -> None:
    from torch.distributed import HashStore

    store = HashStore()
    first, second, third = (Ranks(rank, 3, rank, store) for rank in range(3))
    with pytest.raises(RunError), second.failing_together():
        raise RunError("the disk is gone")
    with pytest.raises(RankError), first.failing_together():
        first.meet("the end", lambda: None)
    with pytest.raises(RankError, match="rank 1: the disk is gone"):
        third.agreed("the summary", dict, lambda: None)
