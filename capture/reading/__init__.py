"""Captured samples as trainers take them: packed, shuffled, shared out, to be stopped and gone on with."""

from .columns import whole_column
from .inspection import inspect_capture
from .order import epoch_order
from .packs import PackedDataset, PackLoader
from .post_norm import PostNorm

__all__ = ["PackLoader", "PackedDataset", "PostNorm", "epoch_order", "inspect_capture", "whole_column"]
