"""The tensors of a shard: name, dtype, trailing shape, and what their first dimension counts."""

import re
from dataclasses import dataclass

import torch

from ...models.errors import UsageError

FORMAT_VERSION = 1

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}

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
    """Bytes of a tensor of this dtype and shape."""
    count = 1
    for size in shape:
        count *= size
    return count * dtype.itemsize


def capture_columns(
    K: int, H: int, dtype: torch.dtype, *, pre_norm: bool = False, post_norm: bool = False, is_text: bool = False
) -> tuple[Column, ...]:
    """The columns of an offline capture: aux_hidden_states (R, K, H), the norm states asked for, ids and loss mask."""
    columns = [Column("aux_hidden_states", dtype, (K, H))]
    if pre_norm:
        columns.append(Column("pre_norm", dtype, (H,)))
    if post_norm:
        columns.append(Column("post_norm", dtype, (H,)))
    columns += [Column("input_ids", torch.int32), Column("loss_mask", torch.uint8)]
    if is_text:
        columns.append(Column("is_text", torch.uint8))
    return tuple(columns)


def generation_columns(
    *, sampling_logprobs: bool = False, logprobs: bool = False, sampling_masks: bool = False, topk: int = 0
) -> tuple[Column, ...]:
    """The columns that generation adds: output_ids, and those asked for; `topk` is how many logits a row keeps."""
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
