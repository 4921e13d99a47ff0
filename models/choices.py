"""The words that options are chosen from, one home for the command, the settings and the code that reads them.

Imports nothing heavy: the command shows its help before torch is loaded.
"""

from __future__ import annotations

from typing import Literal

DtypeName = Literal["auto", "bfloat16", "float16", "float32"]
StoreDtypeName = Literal["bfloat16", "float16", "float32"]
Convention = Literal["layer_output", "boundary"]
Algorithm = Literal["dspark", "dflash", "eagle3"]
Final = Literal["none", "pre", "post", "both"]
OnTooLong = Literal["truncate", "drop"]
LossOn = Literal["assistant", "last", "all"]
OnDropped = Literal["reject", "keep", "raise"]
Think = Literal["keep", "mask"]
IdsFormat = Literal["plain", "kimi"]
OnBadValues = Literal["reject", "raise", "keep"]
CompileMode = Literal["auto", "on", "off"]
Turns = Literal["last", "all"]
CpuFastPaths = Literal["auto", "off"]

DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def dtype_name(name: object) -> object:
    """Return the full name of a dtype given by its short one (``bf16``); anything else is returned as it is."""
    return DTYPE_ALIASES.get(name, name) if isinstance(name, str) else name
