"""One pass over a captured folder: everything that the figures and the verdict are made of."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...models.errors import RunError, UsageError
from ..progress import Done, Progress, Silent, Work
from ..store import KeptMass, Manifest, OutputFolder, Plan, Reject, Shard, ShardDescription, kept_mass
from ..store.diskio import require_folder
from .profile import RowProfile, RowScan
from .reading import Place, chosen, chunks, rows_in
from .sampled import SampledProfile, SampledScan
from .seals import Seals, seals
from .states import states_of

MAX_ROWS = 65_536


@dataclass(frozen=True, eq=False)
class Survey:
    """All that a report needs of a folder.

    about: what its first shard says of model, taps and mode. complete: whether the capture is; None where no manifest says.
    way_on: what to do about an incomplete folder, in one sentence.
    rows: (all) its rows. nbytes: of its shards. lengths: (M,) int64, rows of every sample.
    places: the samples whose rows were read, all or evenly spread ones. profile, sampled: what was measured on these.
    warnings: samples by warning code, as the plan counted them, with the place of the first one ("" where it is not known).
    truncated: samples that were cut, None where no plan says. max_length: most tokens of a sample, None where not known.
    rejects: rejected input rows by reason. broken: what is wrong with shards that cannot be read.
    seals: rows over time, None where the files do not tell.
    top_logits: probability that the stored top logits of a row hold together, None where none are stored.
    """

    path: Path
    about: ShardDescription
    complete: bool | None
    rows: int
    nbytes: int
    lengths: NDArray[np.int64]
    places: tuple[Place, ...]
    profile: RowProfile
    sampled: SampledProfile | None
    warnings: dict[str, tuple[int, str]]
    truncated: int | None
    max_length: int | None
    rejects: Counter[str]
    broken: tuple[str, ...]
    seals: Seals | None
    top_logits: KeptMass | None = None
    way_on: str = ""

    @property
    def read_all(self) -> bool:
        """Return whether every sample's rows were read."""
        return len(self.places) == len(self.lengths)

    @property
    def rows_read(self) -> int:
        """Rows that were read."""
        return len(self.profile.first)


def survey(path: Path, *, max_rows: int = MAX_ROWS, progress: Progress | None = None) -> Survey:
    """Read a folder, one that is still being filled too: all headers, and the rows of about `max_rows` rows' samples.

    Memory: a few copies of one chunk (16 MiB), 8 bytes per sample, and 16 bytes per row and state of what is read.
    Raises UsageError where there is no sealed shard or no sample, RunError where shards hold different columns.
    """
    folder = OutputFolder(path)
    require_folder(path, "the folder of a capture")
    sealed = folder.sealed_shards()
    shards = [sealed.shards[index] for index in sorted(sealed.shards)]
    _require_alike(path, shards)
    places = chosen(shards, max_rows)
    count = rows_in(places)
    rows, sampled = RowScan(states_of(shards[0]), count), SampledScan(count)
    progress = progress or Silent()
    progress.started(Work("reading", count, unit="rows"))
    for chunk in chunks(places):
        rows.add(chunk)
        sampled.add(chunk)
        progress.advanced(Done(len(chunk.sample)))
    plan = Plan(folder.plan) if folder.has_plan else None
    about = shards[0].description
    manifest = Manifest.read(folder.manifest_path) if folder.manifest_path.exists() else None
    return Survey(
        path=path,
        about=about,
        complete=None if manifest is None else manifest.complete,
        rows=sum(shard.R for shard in shards),
        nbytes=sum(shard.nbytes for shard in shards),
        lengths=np.concatenate([np.diff(shard.row_offsets) for shard in shards]),
        places=tuple(places),
        profile=rows.profile(),
        sampled=sampled.profile(),
        warnings=_warnings(plan),
        truncated=int(np.count_nonzero(plan.truncated_from)) if plan else None,
        max_length=_max_length(about),
        rejects=_rejects(folder, plan, shards),
        broken=tuple(str(error) for error in sealed.broken.values()),
        seals=seals(shards, folder.plan / "plan.json"),
        top_logits=kept_mass(shards),
        way_on="" if manifest is None else manifest.way_on,
    )


def _require_alike(path: Path, shards: Sequence[Shard]) -> None:
    if not shards:
        raise UsageError(f"{path} holds no sealed shard.")
    if not any(shard.M for shard in shards):
        raise UsageError(f"{path} holds no captured sample: all were rejected, as rejects.jsonl says.")
    for shard in shards[1:]:
        if shard.columns != shards[0].columns:
            raise RunError(
                f"{shard.path} and {shards[0].path.name} hold different columns; a report needs shards of one run."
            )


def _max_length(about: ShardDescription) -> int | None:
    found = about.tokenisation.get("max_length")
    return found if isinstance(found, int) else None


def _warnings(plan: Plan | None) -> dict[str, tuple[int, str]]:
    if plan is None:
        return {}
    first = plan.extra.first_warning
    return {code: (count, first.get(code, "")) for code, count in plan.extra.warnings.items()}


def _rejects(folder: OutputFolder, plan: Plan | None, shards: Sequence[Shard]) -> Counter[str]:
    if folder.rejects_path.exists():
        found = folder.read_rejects()
    else:
        # The file is written at the end of a run; until then plan and shards have the same lines.
        found = [*(plan.rejects() if plan else ()), *(reject for shard in shards for reject in shard.rejects)]
    return Counter(_reason(reject) for reject in found)


def _reason(reject: Reject) -> str:
    return str(reject.detail.get("code") or reject.reason)
