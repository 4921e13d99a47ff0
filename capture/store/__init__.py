"""Rows on disk: shards written and read, the plan, the manifest."""

from ..rejects import Reject
from .assignment import Assignment, PlannedShard, plan_shards, shard_index, shard_name
from .checks import Finding, check_folder, check_shard
from .columns import FINISH, FINISH_REASONS, Column, capture_columns, generation_columns
from .dataset import CapturedDataset
from .description import ShardDescription, StoredState, TapsDescription
from .errors import (
    DiskFullError,
    FileAccessError,
    FolderLockedError,
    NewerFormatError,
    PlanDamagedError,
    PlanError,
    ShardError,
)
from .folder import OutputFolder, SealedShards
from .growing import GrowingShardWriter
from .layout import ShardLayout
from .lock import FolderLock
from .manifest import NOT_RESUMED, RESUMED, Manifest, ShardEntry, differences
from .plan import Plan
from .plan_extra import PlanExtra
from .plan_writer import PlanWriter
from .samples import ShardSamples
from .shard import Shard
from .top_logits import KeptMass, kept_mass, kept_probabilities
from .version import FORMAT_VERSION
from .writer import PlannedShardWriter

__all__ = [
    "FINISH",
    "FINISH_REASONS",
    "FORMAT_VERSION",
    "NOT_RESUMED",
    "RESUMED",
    "Assignment",
    "CapturedDataset",
    "Column",
    "DiskFullError",
    "FileAccessError",
    "Finding",
    "FolderLock",
    "FolderLockedError",
    "GrowingShardWriter",
    "KeptMass",
    "Manifest",
    "NewerFormatError",
    "OutputFolder",
    "Plan",
    "PlanDamagedError",
    "PlanError",
    "PlanExtra",
    "PlanWriter",
    "PlannedShard",
    "PlannedShardWriter",
    "Reject",
    "SealedShards",
    "Shard",
    "ShardDescription",
    "ShardEntry",
    "ShardError",
    "ShardLayout",
    "ShardSamples",
    "StoredState",
    "TapsDescription",
    "capture_columns",
    "check_folder",
    "check_shard",
    "differences",
    "generation_columns",
    "kept_mass",
    "kept_probabilities",
    "plan_shards",
    "shard_index",
    "shard_name",
]
