"""The public names of a package, read from the imports that its type checkers read."""

from __future__ import annotations

import ast
from pathlib import Path


def public_names(file: str) -> dict[str, str]:
    """Return the module of each name that `file` imports under ``if TYPE_CHECKING:``, as a relative name (``.capture.run``)."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    blocks = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    )
    imports = (line for block in blocks for line in block.body if isinstance(line, ast.ImportFrom))
    return {name.asname or name.name: "." * line.level + (line.module or "") for line in imports for name in line.names}
