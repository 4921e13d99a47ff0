"""Times at which shards were sealed, from their files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..store import Shard


@dataclass(frozen=True, eq=False)
class Seals:
    """seconds: (n+1,) since the first time known; rows: (n+1,) sealed until then."""

    seconds: NDArray[np.float64]
    rows: NDArray[np.int64]


def seals(shards: Sequence[Shard], begun: Path) -> Seals | None:
    """Rows over time: from the plan's seal (the file `begun`) if it is there, else from the first shard's.

    None where fewer than three times are known, or where they do not differ: a copy that did not keep times.
    """
    order = sorted((shard.path.stat().st_mtime, shard.R) for shard in shards)
    if begun.exists():
        order.insert(0, (begun.stat().st_mtime, 0))
    elif order:
        order[0] = (order[0][0], 0)
    times = np.array([time for time, _ in order])
    if len(order) < 3 or times[-1] - times[0] < 1 or (np.diff(times) < 0).any():
        return None
    return Seals(times - times[0], np.cumsum([rows for _, rows in order]))
