"""Errors of the files of an output folder."""

from ...models.errors import RunError


class RefusedError(RunError):
    """The system refused something about a file.

    Attributes:
        what: that alone, without what to do.
    """

    def __init__(self, what: str, advice: str = "") -> None:
        super().__init__(f"{what} {advice}".rstrip())
        self.what = what


class DiskFullError(RefusedError):
    """The file system has no room for what is to be written; says how much was needed and how much is free."""


class FileAccessError(RefusedError):
    """The system refused to open, read or write a file; says which file, what was tried and what to do. The file may be whole."""


class ShardError(RunError):
    """A file is not a whole, sealed shard; says which file and what is wrong with it."""


class PlanError(RunError):
    """The plan folder is missing, unsealed or damaged."""


class PlanDamagedError(PlanError):
    """A sealed plan does not match its own checksums or sizes; the capture that made it plans again from its data."""


class NewerFormatError(ShardError, PlanError):
    """A later release wrote the file; it is neither read nor removed."""


class FolderLockedError(RunError):
    """Another process is writing to the output folder."""
