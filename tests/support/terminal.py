"""The command on a terminal of its own."""

import os
import pty
import subprocess
import sys


def on_a_terminal(*arguments: object, columns: int) -> str:
    """What the command writes there, control sequences and all."""
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "hiddentap", *map(str, arguments)]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "50"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(command, stdout=child, stderr=child, stdin=child, env=environment) as process:
        os.close(child)
        parts = []
        while True:
            try:
                part = os.read(parent, 65536)
            except OSError:
                # How Linux says that the other side of a terminal is closed.
                break
            if not part:
                break
            parts.append(part)
    os.close(parent)
    assert process.returncode == 0
    return b"".join(parts).decode()
