"""What becomes of an input row: a sample or a reject."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .sample_images import SampleImages


@dataclass(frozen=True, eq=False)
class Sample:
    """One input row after tokenisation.

    `input_ids`: (S,) int32. `loss_mask`: (S,) uint8 of 0 and 1; `loss_mask[t]` speaks of `input_ids[t]`, unshifted.
    `line` is 1-based: the line of a `.jsonl` file, the place in a list or table elsewhere.
    `mask_rule` is one of `generation_marks`, `substitution`, `all`, `row`, `kimi_tokens`.
    `warnings` holds short sorted codes, each at most once. `truncated_from` is the length before truncation, or None.
    `images`: of a sample with images, whose `input_ids` are the expanded ones: one for each hidden row.
    Raises ValueError where ids and mask differ in dtype or shape from the above, or there is no token.
    """

    sample_id: str
    source: str
    line: int
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    mask_rule: str
    warnings: tuple[str, ...] = ()
    truncated_from: int | None = None
    images: SampleImages | None = None

    def __post_init__(self) -> None:
        ids, mask = self.input_ids, self.loss_mask
        if ids.dtype != np.int32 or mask.dtype != np.uint8 or ids.ndim != 1 or ids.shape != mask.shape or not ids.size:
            raise ValueError(
                f"expected input_ids (S,) int32 and loss_mask (S,) uint8 with S >= 1; found {ids.shape} {ids.dtype} "
                f"and {mask.shape} {mask.dtype} at {self.source}:{self.line}"
            )

    @property
    def supervised(self) -> int:
        """How many tokens the loss mask marks."""
        return int(self.loss_mask.sum())


@dataclass(frozen=True)
class Reject:
    """One input row that became no sample: where it stands, its id where one was read, and why.

    `reason` is a sentence for people, `code` a short stable word for counting.
    """

    source: str
    line: int
    sample_id: str | None
    reason: str
    code: str


Item = Sample | Reject
