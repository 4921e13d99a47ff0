"""`hiddentap COMMAND ...`: the group of commands, and how errors end it."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext

import click

from ...models.errors import HiddentapError
from ..system_advice import system_advice
from .audit import audit
from .capture import capture
from .export import export
from .generate import generate
from .import_ import import_
from .inspect import inspect
from .layers import layers
from .own_stdout import stdout_kept_for_json
from .printable import printable
from .report import report
from .verify import verify

INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="hiddentap")
def hiddentap() -> None:
    """Capture a causal language model's hidden states at explicit layers as safetensors."""


for command in (capture, audit, layers, inspect, export, import_, verify, generate, report):
    hiddentap.add_command(command)


def main() -> None:
    """Run the command and exit: 0 done, 1 the work failed, 2 wrong use, 130 interrupted. Errors are one line, no traceback."""
    # The tokenizers' own threads and worker processes do not go together.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        with stdout_kept_for_json() if "--json" in sys.argv else nullcontext():
            code = hiddentap.main(standalone_mode=False)
    except click.exceptions.Exit as done:
        code = done.exit_code
    except click.ClickException as error:
        code = _failed(" ".join(error.format_message().split()), 2)  # click lists choices one a line
    except HiddentapError as error:
        code = _failed(str(error), error.exit_code)
    except OSError as error:
        code = _failed(_refused(error), 1)
    except (KeyboardInterrupt, click.Abort):
        code = _failed("interrupted", INTERRUPTED)
    sys.exit(code or 0)


def _refused(error: OSError) -> str:
    """Return the system's message with the file's name, never with a file descriptor, and what to do."""
    if error.strerror is None:
        return str(error)
    names = [str(name) for name in (error.filename, error.filename2) if name is not None and not isinstance(name, int)]
    what = f"{' -> '.join(names)}: cannot be used" if names else "the system refused to read or write a file"
    return f"{what} ({error.strerror}). {system_advice(error)}"


def _failed(text: str, code: int) -> int:
    click.echo(f"hiddentap: {printable(text)}", err=True)
    return code
