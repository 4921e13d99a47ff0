"""Speeds that earlier runs measured on this machine, so that the next run does not measure them again."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Speed:
    """Measured of one model, as it computes, on one device.

    Attributes:
        batch_tokens: the best budget of positions of a forward, with layers as they are.
        eager, compiled: seconds per token with layers as they are and compiled; `compiled` is None until it was tried.
        compiled_batch_tokens: the best budget with compiled layers.
        compile_seconds: what compiling cost once.
    """

    batch_tokens: int
    eager: float
    compiled: float | None = None
    compiled_batch_tokens: int | None = None
    compile_seconds: float | None = None


@dataclass(frozen=True)
class Speeds:
    """The file that keeps them; one entry a key."""

    path: Path

    @classmethod
    def of_user(cls) -> Speeds:
        """Return the file in the user's cache folder."""
        return cls(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hiddentap" / "speeds.json")

    def read(self, key: str) -> Speed | None:
        """Return the entry under `key`, or None if it is missing or of another version."""
        entry = self._all().get(key)
        try:
            return Speed(**entry) if entry else None
        except TypeError:
            return None

    def write(self, key: str, speed: Speed) -> None:
        """Replace the entry under `key`."""
        entries = self._all() | {key: asdict(speed)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(entries, indent=1, sort_keys=True), encoding="utf-8")
        temporary.replace(self.path)

    def _all(self) -> dict[str, Any]:
        try:
            entries = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}  # only measurements are lost, and the run makes them again
        return entries if isinstance(entries, dict) else {}


def speed_key(
    config_sha256: str,
    taps: tuple[str, ...],
    dtype: torch.dtype,
    made_with: Mapping[str, Any],
    *,
    attention: str | None = None,
    top_logits: int = 0,
    cpu_fast_paths: str = "off",
) -> str:
    """Return what a speed depends on, as one text.

    made_with: provenance of the engine, with the device and the way of computing. attention: the implementation that was named,
    None where nobody named one. cpu_fast_paths: the switch; `made_with` does not name a path that changes no bit.
    """
    engine = " ".join(f"{name} {value}" for name, value in sorted(made_with.items()))
    more = (f" attention {attention}" if attention else "") + (f" top {top_logits}" if top_logits else "")
    threads = torch.get_num_threads() if made_with["device"] == "cpu" else 0
    machine = f"{platform.machine()} {threads} torch {torch.__version__}"
    if threads:
        machine += f" fast paths {cpu_fast_paths}"
    return f"{config_sha256[:16]} {taps[-1]} {dtype} {engine} {machine}{more}"
