"""A report written to files."""

from dataclasses import dataclass
from pathlib import Path

from ...models.errors import UsageError
from ..progress import Progress
from ..store.diskio import require_room_for_folder
from .survey import MAX_ROWS, Survey, survey
from .verdict import Notice, notices


@dataclass(frozen=True)
class Report:
    """A written report.

    html: the page. pngs: the figures for light pages, where a folder for them was given.
    """

    survey: Survey
    notices: list[Notice]
    html: Path
    pngs: tuple[Path, ...]


def write_report(
    out: Path, html: Path, png: Path | None = None, *, max_rows: int = MAX_ROWS, progress: Progress | None = None
) -> Report:
    """Look at the folder `out` and write a page to `html`; its figures go into the folder `png` too if there is one.

    Reads the rows of about `max_rows` rows' samples, spread evenly, and says so on the page where that is not all.
    Raises UsageError without the extra `report`, for a folder without sealed shards, and where a file cannot be written;
    RunError for damaged or differing shards.
    """
    try:
        from .figures import figures
        from .page import page
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        raise UsageError("a report needs matplotlib: pip install 'hiddentap[report]'") from error
    seen = survey(out, max_rows=max_rows, progress=progress)
    found, drawn = notices(seen), figures(seen)
    pngs = {png / f"{figure.name}.png": figure.light for figure in drawn} if png is not None else {}
    _write({html: page(seen, found, drawn).encode()} | pngs)
    return Report(seen, found, html, tuple(pngs))


def _write(files: dict[Path, bytes]) -> None:
    for path, data in files.items():
        require_room_for_folder(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        except OSError as error:
            raise UsageError(f"{path} cannot be written ({error.strerror}); choose another place.") from error
