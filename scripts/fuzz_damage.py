#!/usr/bin/env python
"""Flip one bit of one file of a captured folder or of its model, run the commands on it, and see that nothing good is lost.

Folders: finished, half finished, and each as the first release wrote it. A draw flips any bit of any file of such a folder or of
the model, then runs `verify`, `verify --repair`, `capture`, `export` and a reader, each on a copy of its own or one after the
other. After every command:

- a shard that was whole is there, byte for byte, and was not written again;
- what a command wrote, or gave to a reader, equals what it writes and gives without the flip; not so where the flip is in the
  weights of a run that the first release began, which kept no checksum of them;
- no command ended with anything but a result or one of our errors;
- where `verify` was among the commands somebody said something: a finding, a refusal, or a file made whole again; or the file
  means the same as before, or is one that the first release did not guard.

    python scripts/fuzz_damage.py                    # 200 draws
    python scripts/fuzz_damage.py --draws 2000 --seed 7
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from hiddentap import CapturedDataset  # noqa: E402
from hiddentap.capture.formats import ExportSettings, export_dataset  # noqa: E402
from hiddentap.capture.verify import verify  # noqa: E402
from hiddentap.models.errors import HiddentapError  # noqa: E402
from support.captured import captured  # noqa: E402
from support.damage import as_earlier_release  # noqa: E402
from support.model_folder import llama_folder  # noqa: E402

COMMANDS = ("verify", "repair", "capture", "export", "read")
STATES = ("finished", "half", "earlier", "earlier half")
LOCK = ".hiddentap-lock"
SECOND = "shards/shard-000001.safetensors"
Tree = dict[str, bytes]


def tree(folder: Path) -> Tree:
    """Every file by its path below `folder`."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@dataclass
class Draw:
    """One flip and what came of it.

    seen: what was said of it. faults: what must not be.
    """

    state: str
    file: str
    byte: int
    bit: int
    order: tuple[str, ...]
    seen: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.state}, {self.file} byte {self.byte} bit {self.bit}, {' '.join(self.order)}"


class Bench:
    """A model and its captured folder, where each draw gets a copy of its own.

    The copies lie where the originals lay: paths are part of what is stored.
    """

    def __init__(self, folder: Path) -> None:
        self.model, self.out, self.dest = folder / "model", folder / "out", folder / "dest"
        self._kept = folder / "kept"
        llama_folder(self.model)
        self._capture()
        self.whole = tree(self.out)
        self._keep("finished")
        (self.out / SECOND).unlink()
        self._keep("half")
        as_earlier_release(self.out)
        self._keep("earlier half")
        self._restore("finished")
        as_earlier_release(self.out)
        self._keep("earlier")
        self._restore("finished")
        self._export()
        self.exported = self._exports()
        self.items = self._read()

    def draw(self, draw: random.Random) -> Draw:
        """Flip one bit, run the commands, and hold what is there against what must be."""
        state = draw.choice(STATES)
        self._restore(state)
        files = [
            path for path in (*self.out.rglob("*"), *self.model.rglob("*")) if path.is_file() and path.stat().st_size
        ]
        path = draw.choice(sorted(files))
        byte, bit = draw.randrange(path.stat().st_size), draw.randrange(8)
        order = tuple(draw.sample(COMMANDS, draw.randint(2, len(COMMANDS))))
        one = Draw(state, str(path.relative_to(self.out.parent)), byte, bit, order)
        data = bytearray(path.read_bytes())
        data[byte] ^= 1 << bit
        path.write_bytes(data)
        whole = self._whole_shards()
        for command in order:
            self._run(command, one)
            lost = [name for name, was in whole.items() if self._shards().get(name) != was]
            one.faults += [f"{command} lost or wrote again {name}" for name in lost]
            whole = {name: was for name, was in whole.items() if name not in lost} | self._whole_shards()
        if {"verify", "repair"} & set(order) and not one.seen and not self._may_be_unseen(one, path, bytes(data)):
            one.faults.append("nobody said anything")
        return one

    def _run(self, command: str, one: Draw) -> None:
        before = self._shards().keys()
        try:
            getattr(self, f"_{command}_")(one)
        except HiddentapError as error:
            one.seen.append(f"{command}: {type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the fault that is looked for
            one.faults.append(f"{command} ended with {type(error).__name__}: {error}")
        for name in self._shards().keys() - before:
            if (self.out / "shards" / name).read_bytes() != self.whole[f"shards/{name}"]:
                self._differs(f"{command} wrote {name} with other bytes", one)

    def _differs(self, what: str, one: Draw) -> None:
        """Rows of a run that the first release began, which kept no checksum of the weights, follow the weights there are."""
        unguarded = one.state == "earlier half" and one.file.startswith("model/")
        (one.seen if unguarded else one.faults).append(what)

    def _verify_(self, one: Draw, *, repair: bool = False) -> None:
        report = verify(self.out, repair=repair)
        one.seen += [f"verify: {finding.what}" for finding in report.findings if self._is_news(finding.what, one.state)]
        one.seen += [
            f"verify: {note}" for note in report.notes if "not what was captured" in note or "cannot be" in note
        ]

    def _repair_(self, one: Draw) -> None:
        self._verify_(one, repair=True)

    def _capture_(self, one: Draw) -> None:
        before = tree(self.out)
        self._capture()
        now = tree(self.out)
        for name, data in now.items():
            if before.get(name) == data:
                continue
            if name.startswith(("shards/", "plan/", "head/")) or name in ("manifest.json", "rejects.jsonl"):
                if data == self.whole[name]:
                    one.seen.append(f"capture made {name} whole")
                elif not (one.state.startswith("earlier") and name == "manifest.json"):
                    self._differs(f"capture wrote {name} with other bytes", one)

    def _export_(self, one: Draw) -> None:
        shutil.rmtree(self.dest, ignore_errors=True)
        self._export()
        if self._exports() != self.exported:
            self._differs("export wrote other bytes", one)

    def _read_(self, one: Draw) -> None:
        if self._read() != self.items:
            self._differs("a reader got other values", one)

    def _capture(self) -> None:
        data = self.out.with_suffix(".jsonl")
        captured(self.model, self.out, exact=True, head=True, layer_ids=(0, 1, 2), data=data if data.exists() else None)

    def _export(self) -> None:
        export_dataset(ExportSettings(self.out, "specforge", self.dest, algorithm="eagle3"))

    def _exports(self) -> Tree:
        return {name: data for name, data in tree(self.dest).items() if not name.startswith(("hiddentap-export", LOCK))}

    def _read(self) -> list[dict[str, object]]:
        items = [CapturedDataset(self.out, check=True)[i] for i in range(6)]
        return [{name: _plain(value) for name, value in item.items()} for item in items]

    def _shards(self) -> dict[str, tuple[int, int]]:
        """What changes where a shard is written again, by name."""
        return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in (self.out / "shards").iterdir()}

    def _whole_shards(self) -> dict[str, tuple[int, int]]:
        return {
            name: stamp
            for name, stamp in self._shards().items()
            if (self.out / "shards" / name).read_bytes() == self.whole.get(f"shards/{name}")
        }

    def _is_news(self, what: str, state: str) -> bool:
        usual = ("planned shards are not there yet", "the capture is not complete", "missing; the manifest lists")
        return not ("half" in state and any(words in what for words in usual))

    def _may_be_unseen(self, one: Draw, path: Path, data: bytes) -> bool:
        """Whether a flip in this file changes nothing that anybody uses, or is in what the first release did not guard."""
        if path.name == LOCK or not path.is_relative_to(self.out):
            return True  # of a model's file nothing was made that differs: that was held against what must be
        if (one.state.startswith("earlier") and path.suffix != ".safetensors") or path.is_relative_to(
            self.out / "head"
        ):
            return one.state.startswith("earlier")
        original = (self._kept / "finished" / "out" / path.relative_to(self.out)).read_bytes()
        try:
            return path.suffix == ".json" and bool(json.loads(data) == json.loads(original))
        except ValueError:
            return False

    def _keep(self, state: str) -> None:
        for folder in (self.out, self.model):
            shutil.copytree(folder, self._kept / state / folder.name)

    def _restore(self, state: str) -> None:
        for folder in (self.out, self.model):
            shutil.rmtree(folder)
            shutil.copytree(self._kept / state / folder.name, folder)


def _plain(value: object) -> object:
    return value.tolist() if hasattr(value, "tolist") else value


def draws(bench: Bench, seed: int, count: int) -> Iterator[Draw]:
    """`count` draws; draw i of a seed is the same whatever came before it."""
    for number in range(count):
        yield bench.draw(random.Random(f"{seed} {number}"))


def main(say: Callable[[str], object] = print) -> int:
    """Run the draws, print each fault and the counts; 1 where there was a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="print what was said in every draw")
    given = parser.parse_args()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for number, one in enumerate(draws(Bench(Path(folder)), given.seed, given.draws)):
            part = one.file.split("/")[0] if one.file.startswith("model") else one.file.split("/")[1]
            counts[f"{part}: {'seen' if one.seen else 'harmless'}"] += 1
            counts["faults"] += bool(one.faults)
            if one.faults or given.show:
                say(f"draw {number} (seed {given.seed}): {one}")
                for line in (*one.faults, *(f"  said: {said[:300]}" for said in one.seen)):
                    say(f"  {line}")
    say(f"{given.draws} draws of seed {given.seed}: " + ", ".join(f"{name} {n}" for name, n in sorted(counts.items())))
    return 1 if counts["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
