"""The tensors of a shard: name, dtype, trailing shape, and what their first dimension counts."""

import re
from dataclasses import dataclass

import torch

from ...models.errors import UsageError
from ...models.safetensors_dtypes import DTYPES as SAFETENSORS_DTYPES

# Every one holds whole entries: no two share a byte.
DTYPES: dict[str, torch.dtype] = {
    name: SAFETENSORS_DTYPES[name]
    for name in [
        "F64",
        "F32",
        "F16",
        "BF16",
        "F8_E4M3",
        "F8_E5M2",
        "I64",
        "I32",
        "I16",
        "I8",
        "U64",
        "U32",
        "U16",
        "U8",
        "BOOL",
    ]
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

ROWS = "rows"
SAMPLING_MASK = "sampling_mask"
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class Column:
    """One tensor that the caller fills.

    name: lower-case identifier, the tensor's name in the file.
    shape: the dimensions after the first.
    axis: what the first dimension counts: "rows" (R), or "sampling_mask" (the ids of all rows' sampling masks, flat).
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    axis: str = ROWS

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError(f"a column's name is a lower-case identifier, got {self.name!r}.")
        if self.dtype not in DTYPE_NAMES:
            known = ", ".join(DTYPES)
            raise UsageError(f"column {self.name!r}: {self.dtype} cannot be stored in safetensors; use one of {known}.")
        if self.axis not in (ROWS, SAMPLING_MASK):
            raise UsageError(f"column {self.name!r}: axis must be {ROWS!r} or {SAMPLING_MASK!r}, got {self.axis!r}.")

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry of the first dimension."""
        return item_bytes(self.dtype, self.shape)


def item_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor of this dtype and shape."""
    count = 1
    for size in shape:
        count *= size
    return count * dtype.itemsize


def capture_columns(
    K: int,
    H: int,
    dtype: torch.dtype,
    *,
    norm_size: int | None = None,
    pre_norm: bool = False,
    post_norm: bool = False,
    is_text: bool = False,
) -> tuple[Column, ...]:
    """Return the columns of an offline capture: aux_hidden_states (R, K, H), the norm states asked for, ids and loss mask.

    norm_size: width of the norm states; None: H.
    """
    norm = (norm_size or H,)
    columns = [Column("aux_hidden_states", dtype, (K, H))]
    if pre_norm:
        columns.append(Column("pre_norm", dtype, norm))
    if post_norm:
        columns.append(Column("post_norm", dtype, norm))
    columns += [Column("input_ids", torch.int32), Column("loss_mask", torch.uint8)]
    if is_text:
        columns.append(Column("is_text", torch.uint8))
    return tuple(columns)


# Why an answer ended, told by the row that its last token was sampled from; 0 in every other row.
FINISH = "finish_reasons"
FINISH_REASONS = ("none", "stop_token", "stop_string", "length", "abort", "refused")


def generation_columns(
    *, sampling_logprobs: bool = False, logprobs: bool = False, sampling_masks: bool = False, topk: int = 0
) -> tuple[Column, ...]:
    """Return the columns that generation adds: output_ids, and those asked for; `topk` is how many logits a row keeps."""
    columns = [Column("output_ids", torch.int32)]
    if sampling_logprobs:
        columns.append(Column("sampling_logprobs", torch.float32))
    if logprobs:
        columns.append(Column("logprobs", torch.float32))
    if sampling_masks:
        columns.append(Column("sampling_mask_lengths", torch.int32))
        columns.append(Column("sampling_mask_ids", torch.int32, axis=SAMPLING_MASK))
    if topk:
        columns.append(Column("topk_logits", torch.float32, (topk,)))
        columns.append(Column("topk_ids", torch.int32, (topk,)))
        columns.append(Column("topk_logsumexp", torch.float32))
    return tuple(columns)
