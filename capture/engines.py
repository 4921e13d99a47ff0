"""The inference backends of a run by name: what settings and the command need to know of each before its code is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..models.errors import UsageError


@dataclass(frozen=True)
class EngineEntry:
    """One backend.

    Attributes:
        module: where its `KIND` is, an `EngineKind`; relative to `capture.run`.
        about: one line for the command's help.
        takes_options: whether it reads `engine_options`.
        takes_workers: whether it runs in workers of a cluster, which `ray` describes.
        spreads: whether `tp` processes of torchrun can hold one copy of its model together.
        answers: where its `KIND` of a regeneration is, an `AnswerEngineKind`, relative to `capture.regeneration`; None where it
            generates nothing.
        steps: whether a generation can keep the rows of its steps.
    """

    module: str
    about: str
    takes_options: bool = False
    takes_workers: bool = False
    spreads: bool = False
    answers: str | None = None
    steps: bool = False


ENGINES: dict[str, EngineEntry] = {
    "hf": EngineEntry(
        ".engines.hugging_face.backend",
        "the Hugging Face model in this process",
        spreads=True,
        answers=".hugging_face",
        steps=True,
    ),
    "ray": EngineEntry(".ray.run", "one such model per Ray worker (extra ray)", takes_workers=True),
    "vllm": EngineEntry(".engines.vllm", "vLLM (extra vllm)", takes_options=True, answers=".vllm"),
}


def engines_that(take: Callable[[EngineEntry], bool]) -> str:
    """Return the names of the backends that `take` holds for, joined for a message."""
    return ", ".join(name for name, entry in ENGINES.items() if take(entry))


def require_engine(name: str, options: Mapping[str, Any]) -> None:
    """Raise UsageError for a backend that is not there, or options that it does not take."""
    if name not in ENGINES:
        raise UsageError(f"engine must be one of {', '.join(ENGINES)}; got {name!r}.")
    if options and not ENGINES[name].takes_options:
        raise UsageError(
            f"engine options ({', '.join(options)}) are for the engine {engines_that(lambda entry: entry.takes_options)}; got "
            f"{name!r}."
        )
