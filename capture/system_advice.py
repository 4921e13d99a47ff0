"""What to do about an error of the operating system."""

from __future__ import annotations

import errno

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FILES = "Raise the limit on open files (`ulimit -n`) and run again."
_SERVER = "The file server lost or refuses it: see that its folder is mounted, then run again."
_RIGHTS = "See who owns it and what its permissions are (`ls -l`), then run again."
_DEVICE = (
    "The disk or the way to it fails: look at the system's log (`dmesg`) before running again; what is on disk is kept."
)
_ADVICE = {
    **dict.fromkeys(FULL, "Make room or raise the quota, then run again."),
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
    errno.ESTALE: _SERVER,
    errno.ETIMEDOUT: _SERVER,
    errno.ENOTCONN: _SERVER,
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EROFS: "Its file system is mounted read-only; choose another folder.",
    errno.EIO: _DEVICE,
}


def system_advice(error: OSError) -> str:
    """Return what to do about the error, by its number."""
    return _ADVICE.get(error.errno or 0, "Run again once that is mended; what is on disk is kept.")
