"""One run on several processes, as torchrun starts them."""

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hiddentap import CapturedDataset, CaptureSettings, ModelSource, capture_dataset
from hiddentap.capture.run.distributed.ranks import RankError, Ranks
from hiddentap.models.errors import RunError
from support.model_folder import chat, write_rows
from support.ports import free_port

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


def test_two_processes_with_streamed_weights_fill_blocks_of_their_own_to_the_same_bytes(
    llama: Path, tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "many.jsonl", MANY)
    options = (
        "--model",
        llama,
        "--data",
        data,
        "--layer-ids",
        "0,2",
        "--exact",
        "--shard-rows",
        ROWS,
        "--stream-weights",
    )
    for count, out in ((2, "two"), (1, "one")):
        done = torchrun(count, "capture", *options, "--block-tokens", 2 * ROWS, "--out", tmp_path / out)
        assert done.returncode == 0, done.stderr
    shards = sorted((tmp_path / "one/shards").iterdir())
    assert len(shards) > 4
    for shard in shards:
        assert shard.read_bytes() == (tmp_path / "two/shards" / shard.name).read_bytes()


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


@pytest.fixture
def agent_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The store of torchrun's agent, which outlives the processes that it restarts, and the environment of rank 1 of 2."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**given, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    yield
    del store


def test_a_restart_by_torchrun_sees_nothing_of_the_attempt_before(agent_store: None, monkeypatch) -> None:
    def attempt(restarts: int) -> Ranks:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        monkeypatch.setattr("hiddentap.capture.run.distributed.ranks._runs", itertools.count())  # a process of its own
        return Ranks.of_environment()

    first = attempt(0)
    with pytest.raises(RunError), first.failing_together():
        raise RunError("killed")
    assert next(first.take([4, 7])) == 4
    with pytest.raises(RankError, match="killed"):
        attempt(0).require_no_failure()
    second = attempt(1)
    second.require_no_failure()
    assert next(second.take([4, 7])) == 4


def test_the_first_rank_waits_until_the_others_have_parted_but_not_for_a_killed_one(monkeypatch) -> None:
    from torch.distributed import HashStore

    store = HashStore()
    first, second = (Ranks(rank, 2, rank, store) for rank in range(2))
    parting = threading.Thread(target=first.part)
    parting.start()
    time.sleep(0.5)
    assert parting.is_alive()
    second.part()
    parting.join(10)
    assert not parting.is_alive()
    monkeypatch.setattr("hiddentap.capture.run.distributed.ranks._PARTING_S", 0.1)
    Ranks(0, 2, 0, HashStore()).part()


def test_both_of_two_ranks_end_well_where_the_first_one_holds_the_store(llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "few.jsonl", MANY[:10])
    command = [sys.executable, "-m", "hiddentap", "capture", "--model", llama, "--data", data, "--layer-ids", "0,2"]
    given = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [*map(str, command), "--out", str(tmp_path / "out")],
            env=os.environ | given | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ended
    assert len(CapturedDataset(tmp_path / "out")) == 10


def test_a_rank_whose_store_is_gone_says_so_in_one_line(llama: Path) -> None:
    from torch.distributed import TCPStore

    held = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = Ranks(1, 2, 1, TCPStore("127.0.0.1", held.port, is_master=False))
    del held
    with pytest.raises(RankError, match="the process that holds the store of this run is gone"):
        ranks.agreed("the summary", dict, lambda: None)
