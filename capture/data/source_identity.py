"""What tells the content of a source."""

import hashlib
from pathlib import Path
from typing import Any


def source_identity(source: str) -> dict[str, Any]:
    """Size and sha256 of a file; of anything else, which is fetched by its name, the name."""
    path = Path(source)
    if not path.is_file():
        return {"name": source}
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
