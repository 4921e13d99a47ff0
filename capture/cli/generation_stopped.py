"""The end of a generation on a signal."""

from __future__ import annotations

from pathlib import Path

from ...models.errors import RunError
from ..run import RunStopped, Stopping
from ..store import RESUMED


class GenerationStopped(RunError):  # noqa: N818 - an ending that was asked for
    """The generation was asked to end."""

    def __init__(self, out: Path, exit_code: int) -> None:
        super().__init__(
            f"stopped; sealed shards stay in {out} (CapturedDataset reads them with allow_incomplete=True). {RESUMED}"
        )
        self.exit_code = exit_code


def check_stopped(stopping: Stopping, out: Path) -> None:
    """Raise `GenerationStopped` if the end was asked for."""
    try:
        stopping.check()
    except RunStopped as stopped:
        raise GenerationStopped(out, stopped.exit_code) from stopped
