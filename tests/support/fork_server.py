"""The command in processes of their own, without their start: a server that has imported everything forks one for each."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch.distributed import TCPStore

TESTS = Path(__file__).parent.parent
START = "import sys; sys.path.insert(0, sys.argv[1]); from support.fork_server import serve; serve()"
PRELOADED = (
    "hiddentap.capture.cli.main",
    "hiddentap.capture.run",
    "hiddentap.capture.verify",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.tokenization_auto",
    "support.run_places",
)


@dataclass(frozen=True)
class Ended:
    """How a run ended: its exit code, negative for a signal, and all that it printed."""

    code: int
    text: str


class Run:
    """One run of the command in a forked process."""

    def __init__(self, server: ForkServer, pid: int, log: Path) -> None:
        self._server, self.pid, self._log = server, pid, log

    def lives(self) -> bool:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"

    def ended_within(self, seconds: float) -> Ended:
        """Kill it, and raise, if it goes on for longer."""
        end = time.monotonic() + seconds
        while self.lives():
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
                raise AssertionError(f"process {self.pid} did not end: {self._log.read_text()}")
            time.sleep(0.02)
        return self.wait()

    def wait(self) -> Ended:
        return Ended(int(self._server.ask({"wait": self.pid})), self._log.read_text())


class ForkServer:
    """`with ForkServer(folder) as server: server.start("capture", ...)`; what runs print goes to files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._runs = folder, 0
        self.store: TCPStore | None = None  # the one that the last ranks meet in

    def __enter__(self) -> Self:
        command = [sys.executable, "-c", START, str(TESTS)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()

    def start(self, *arguments: object, place: str = "", given: Mapping[str, Any] | None = None) -> Run:
        """Run `hiddentap ARGUMENTS`, if there are any; before it, the function `place` of support.run_places with `given`."""
        self._runs += 1
        log = self._folder / f"{self._runs}.log"
        job = {"run": [str(a) for a in arguments], "log": str(log), "place": place, "given": dict(given or {})}
        return Run(self, int(self.ask(job)), log)

    def run(self, *arguments: object, place: str = "", given: Mapping[str, Any] | None = None) -> Ended:
        return self.start(*arguments, place=place, given=given).wait()

    def call(self, place: str, **given: Any) -> Ended:
        """Call the function `place` of support.run_places in a process of its own, and no command after it."""
        return self.run(place=place, given=given)

    def start_ranks(
        self, size: int, *arguments: object, then: Mapping[str, Mapping[str, Any]] | None = None
    ) -> list[Run]:
        """Run `hiddentap ARGUMENTS` in `size` processes, as torchrun starts them, without anybody who ends the others when one
        ends. `then`: functions of support.run_places that are called before, with what they are given."""
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = {"size": size, "port": self.store.port, "then": dict(then or {})}
        return [self.start(*arguments, place="one_rank", given={"rank": rank, **common}) for rank in range(size)]

    def ask(self, job: Mapping[str, Any]) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()


def serve() -> None:
    """Fork a process for each job that is read; answer its id, and later how it ended."""
    for module in PRELOADED:
        importlib.import_module(module)
    while line := sys.stdin.readline():
        job = json.loads(line)
        if "wait" in job:
            answer = os.waitstatus_to_exitcode(os.waitpid(job["wait"], 0)[1])
        elif (answer := os.fork()) == 0:
            os._exit(_run(job["run"], job["log"], job["place"], job["given"]))
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


def _run(arguments: Sequence[str], log: str, place: str, given: Mapping[str, Any]) -> int:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(file, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["hiddentap", *arguments]
    try:
        if place:
            getattr(importlib.import_module("support.run_places"), place)(**given)
        if arguments:
            importlib.import_module("hiddentap.capture.cli.main").main()
    except SystemExit as ended:
        return int(ended.code or 0)
    except BaseException:  # noqa: BLE001 - what an interpreter does at its top
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0
