"""Rows on disk: shards written and read, the plan, the manifest."""

from .assignment import Assignment, PlannedShard, plan_shards, shard_index, shard_name
from .checks import Finding, check_folder, check_shard
from .columns import FORMAT_VERSION, Column, capture_columns, generation_columns
from .dataset import CapturedDataset
from .errors import DiskFullError, FolderLockedError, PlanError, ShardError
from .folder import OutputFolder, SealedShards
from .growing import GrowingShardWriter
from .layout import ShardLayout
from .lock import FolderLock
from .manifest import Manifest, ShardEntry, differences
from .plan import Plan
from .plan_writer import PlanWriter
from .rejects import Reject
from .samples import ShardSamples
from .shard import Shard
from .writer import PlannedShardWriter

__all__ = [
    "FORMAT_VERSION",
    "Assignment",
    "CapturedDataset",
    "Column",
    "DiskFullError",
    "Finding",
    "FolderLock",
    "FolderLockedError",
    "GrowingShardWriter",
    "Manifest",
    "OutputFolder",
    "Plan",
    "PlanError",
    "PlanWriter",
    "PlannedShard",
    "PlannedShardWriter",
    "Reject",
    "SealedShards",
    "Shard",
    "ShardEntry",
    "ShardError",
    "ShardLayout",
    "ShardSamples",
    "capture_columns",
    "check_folder",
    "check_shard",
    "differences",
    "generation_columns",
    "plan_shards",
    "shard_index",
    "shard_name",
]
