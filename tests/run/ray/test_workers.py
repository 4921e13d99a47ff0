"""One run on the workers of a Ray cluster."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hiddentap import CapturedDataset, CaptureSettings, ModelSource, RayWorkers, capture_dataset
from hiddentap.capture.run.ray.run import divided
from hiddentap.models.errors import UsageError
from support.model_folder import chat, llama_folder, write_rows

MANY = [chat("q" * (i % 7), "a" * (5 + i % 61), id=f"s{i}") for i in range(900)]
ROWS = 8000


def test_without_ray_the_extra_is_named(llama: Path, data: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"engine ray needs Ray .*pip install 'hiddentap\[ray\]'"):
        capture_dataset(settings(llama, data, tmp_path / "out", engine="ray"))
    assert not (tmp_path / "out").exists()


def test_under_torchrun_engine_ray_is_refused(llama: Path, data: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="start it once, without torchrun"):
        capture_dataset(settings(llama, data, tmp_path / "out", engine="ray"))


def test_workers_are_at_least_one_and_have_no_fewer_than_no_gpus() -> None:
    with pytest.raises(UsageError, match="at least 1 Ray worker; got 0"):
        RayWorkers(0)
    with pytest.raises(UsageError, match=r"at least 0; got -0.5"):
        RayWorkers(2, gpus=-0.5)


def settings(model: Path, data: Path, out: Path, **fields: object) -> CaptureSettings:
    return CaptureSettings(ModelSource(str(model)), (str(data),), out, layer_ids=(0, 2), exact=True, **fields)


@pytest.mark.parametrize(
    ("shards", "parts", "expected"),
    [
        ((0, 1, 2, 4, 7), 2, [(0, 1), (2, 4, 7)]),
        ((3, 5), 3, [(3,), (5,)]),
        ((3, 5, 6), 3, [(3,), (5,), (6,)]),
        ((), 2, []),
    ],
)
def test_workers_of_streamed_weights_take_neighboring_shards(shards, parts, expected) -> None:
    assert divided(shards, parts) == expected


class Command:
    """`hiddentap capture --engine ray` with two workers, in a process of its own with a cluster of its own."""

    def __init__(self, model: Path, data: Path, out: Path, *options: str) -> None:
        self.out = out
        command = [sys.executable, "-m", "hiddentap", "capture", "--engine", "ray", "--workers", "2", "--exact"]
        command += ["--model", model, "--data", data, "--layer-ids", "0,2", "--shard-rows", ROWS, "--out", out]
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        self._process = subprocess.Popen(
            [str(part) for part in (*command, *options)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def writers(self) -> set[int]:
        """The processes that fill a shard now."""
        return {pid for pid in processes() if any(file.endswith(".open") for file in files_of(pid, self.out))}

    def workers(self) -> set[int]:
        """The processes of workers that have the folder's lock open."""
        lines = {pid: Path(f"/proc/{pid}/cmdline") for pid in processes() if files_of(pid, self.out)}
        return {pid for pid, line in lines.items() if b"ShardWorker" in line.read_bytes()}

    def wait_for_writers(self, count: int) -> set[int]:
        """The processes that fill shards, once there are so many at least."""
        end = time.monotonic() + 300
        while len(found := self.writers()) < count:
            assert self._process.poll() is None, self._process.communicate()[1]
            assert time.monotonic() < end, "no worker began a shard"
            time.sleep(0.01)
        return found

    def wait_for_a_sealed_shard(self) -> None:
        end = time.monotonic() + 300
        while not list((self.out / "shards").glob("*.safetensors")):
            assert self._process.poll() is None, self._process.communicate()[1]
            assert time.monotonic() < end, "no shard was sealed"
            time.sleep(0.01)

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def ended(self) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        out, err = self._process.communicate(timeout=300)
        return self._process.returncode, out, err

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


def processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def files_of(pid: int, folder: Path) -> list[str]:
    """The files under `folder` that a process has open."""
    try:
        links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:  # it ended meanwhile, or is another user's
        return []
    return [link for link in links if link.startswith(str(folder))]


def started_by_ray(out: Path) -> list[str]:
    """Command lines of processes of a cluster that name a worker of the run on `out`, or Ray's own."""
    lines = []
    for pid in processes():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if f"RUN_OF={out}".encode() in environment and "ray" in line:
            lines.append(line)
    return lines


@pytest.fixture(scope="module")
def long_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "many.jsonl", MANY)


@pytest.fixture(scope="module")
def whole(llama: Path, long_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a run of one process, without Ray."""
    out = tmp_path_factory.mktemp("whole") / "out"
    capture_dataset(settings(llama, long_data, out, shard_rows=ROWS))
    return files(out)


def files(out: Path) -> dict[str, bytes]:
    paths = (path for path in out.rglob("*") if path.is_file() and path.name != ".hiddentap-lock")
    return {str(path.relative_to(out)): path.read_bytes() for path in paths}


@pytest.fixture
def start(llama: Path, long_data: Path, tmp_path: Path, monkeypatch) -> Iterator:
    """Start the command; whatever becomes of the test, it is ended, and so is its cluster."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
    out = tmp_path / "out"
    monkeypatch.setenv("RUN_OF", str(out))
    commands = []

    def started(*options: str, model: Path = llama, data: Path = long_data) -> Command:
        commands.append(Command(model, data, out, *options))
        return commands[-1]

    yield started
    for command in commands:
        command.kill()


def wait_until_gone(out: Path) -> None:
    end = time.monotonic() + 60
    while left := started_by_ray(out):
        assert time.monotonic() < end, left
        time.sleep(0.1)


@pytest.mark.slow
def test_a_killed_worker_costs_its_unsealed_shard_and_the_folder_is_that_of_one_process(start, whole, tmp_path) -> None:
    command = start()
    first = command.wait_for_writers(2)
    killed = min(first)
    os.kill(killed, signal.SIGKILL)
    # Another process takes the place of the one that was killed.
    later: set[int] = set()
    while len(later) < 2:
        later |= command.wait_for_writers(1) - {killed}
    code, out, err = command.ended()
    assert code == 0, err
    assert "900 captured, 0 rejected" in out
    assert err.count("a worker was lost; shard") == 1
    assert killed not in later
    assert later - first
    assert files(tmp_path / "out") == whole
    assert len(CapturedDataset(tmp_path / "out")) == 900
    wait_until_gone(tmp_path / "out")


@pytest.mark.slow
def test_workers_of_streamed_weights_fill_the_folder_of_one_process_though_one_is_killed(
    start, llama: Path, long_data: Path, tmp_path: Path
) -> None:
    alone = tmp_path / "alone"
    capture_dataset(settings(llama, long_data, alone, shard_rows=ROWS, stream_weights=True))
    command = start("--stream-weights", "--block-tokens", str(ROWS))
    command.wait_for_a_sealed_shard()  # of seven: each of the two workers has more to do
    os.kill(min(command.workers()), signal.SIGKILL)
    code, _, err = command.ended()
    assert code == 0, err
    assert "a worker was lost; what is not sealed of shards" in err
    assert files(command.out) == files(alone)


@pytest.mark.slow
def test_sigint_ends_all_workers_and_the_run_goes_on_without_ray(start, whole, llama, long_data, tmp_path) -> None:
    command = start()
    command.wait_for_writers(2)
    command.interrupt()
    code, _, err = command.ended()
    assert code == 130
    assert err.splitlines()[-1] == "hiddentap: stopped by SIGINT; run the same command again to go on from here"
    assert json.loads((tmp_path / "out/manifest.json").read_text())["complete"] is False
    assert not list((tmp_path / "out/shards").glob("*.open"))
    wait_until_gone(tmp_path / "out")
    capture_dataset(settings(llama, long_data, tmp_path / "out", shard_rows=ROWS))
    assert files(tmp_path / "out") == whole


@pytest.mark.slow
def test_an_error_in_a_worker_is_the_error_of_the_run(start, tmp_path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [*MANY[:200], chat("q", "z", id="the bad one")])
    command = start("--on-bad-values", "raise", model=llama_without("z", tmp_path / "model"), data=data)
    code, _, err = command.ended()
    assert code == 1
    assert err.splitlines()[-1].startswith("hiddentap: sample 'the bad one': ")
    assert json.loads((tmp_path / "out/manifest.json").read_text())["complete"] is False
    wait_until_gone(tmp_path / "out")


def llama_without(character: str, folder: Path) -> Path:
    """A model that gives no numbers after this character."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    weights = llama_folder(folder) / "model.safetensors"
    tensors = load_file(weights)
    (token,) = AutoTokenizer.from_pretrained(folder).encode(character, add_special_tokens=False)
    tensors["model.embed_tokens.weight"][token] = float("nan")
    save_file(tensors, weights, metadata={"format": "pt"})
    return folder


CLUSTER = """
import os, subprocess, sys
from hiddentap import RayWorkers
from hiddentap.capture.run.ray.cluster import connected, require_ray

ray = require_ray()
join = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False); print(ray.is_initialized())"
with connected(RayWorkers()):
    address = ray.get_runtime_context().gcs_address
    for knows in (True, False):
        environment = {name: value for name, value in os.environ.items() if knows or not name.startswith("RAY_AUTH")}
        ended = subprocess.run([sys.executable, "-c", join, address], env=environment, capture_output=True, text=True)
        print(knows, ended.returncode == 0, ended.stdout.strip())
"""


@pytest.mark.slow
def test_a_cluster_of_a_run_lets_nobody_in_without_the_token_of_the_environment(monkeypatch) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 2)
    ended = subprocess.run([sys.executable, "-c", CLUSTER], capture_output=True, text=True, check=False)
    assert ended.stdout.split() == ["True", "True", "True", "False", "False"], ended.stderr
