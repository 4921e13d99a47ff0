"""Where `scripts/smollm2.py` puts the SmolLM2-135M-Instruct folder."""

import os
from pathlib import Path


def smollm2_path() -> Path:
    """The default place of the folder; whether it is there is for the caller to ask."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "hiddentap" / "smollm2-135m-instruct"
