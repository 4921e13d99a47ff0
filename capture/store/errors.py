"""What can go wrong with the files of an output folder."""

from ...models.errors import RunError


class DiskFullError(RunError):
    """The file system has no room for what is to be written; says how much was needed and how much is free."""


class ShardError(RunError):
    """A file is not a whole, sealed shard; says which file and what is wrong with it."""


class PlanError(RunError):
    """The plan folder is missing, unsealed or damaged."""


class FolderLockedError(RunError):
    """Another process is writing to the output folder."""
