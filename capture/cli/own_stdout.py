"""Standard output for the one JSON object alone: what libraries print there goes to standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from contextvars import ContextVar
from typing import TextIO

_ours: ContextVar[TextIO | None] = ContextVar("_ours", default=None)


def own_stdout() -> TextIO:
    """Return the standard output that the command was started with."""
    return _ours.get() or sys.stdout


@contextmanager
def stdout_kept_for_json() -> Iterator[None]:
    """Send everything that is printed inside the block to standard error, by this process or by one that it starts.

    What is written to `own_stdout()` still arrives.
    """
    with ExitStack() as stack:
        ours = stack.enter_context(_descriptor_kept()) or sys.stdout
        stack.enter_context(redirect_stdout(sys.stderr))
        token = _ours.set(ours)
        try:
            yield
        finally:
            ours.flush()
            _ours.reset(token)


@contextmanager
def _descriptor_kept() -> Iterator[TextIO | None]:
    """Yield a stream to the file that was descriptor 1 before the block; None if `sys.stdout` is another file."""
    try:
        is_first = sys.stdout.fileno() == 1 and sys.stderr.fileno() == 2
    except (OSError, ValueError, AttributeError):  # replaced by a stream without a file
        is_first = False
    if not is_first:
        yield None
        return
    sys.stdout.flush()
    before = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(before), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors) as ours:
            yield ours
    finally:
        sys.stdout.flush()
        os.dup2(before, 1)
        os.close(before)
