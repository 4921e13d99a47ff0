"""The layouts that there are."""

from __future__ import annotations

from .angelslim import ANGELSLIM
from .automodel_dspark import AUTOMODEL_DSPARK
from .automodel_eagle3 import AUTOMODEL_EAGLE3
from .deepspec import DEEPSPEC
from .eagle1 import EAGLE1
from .errors import FormatError
from .layout import Format
from .modelopt import MODELOPT
from .specforge import SPECFORGE
from .speculators import SPECULATORS

FORMATS: dict[str, Format] = {
    layout.name: layout
    for layout in (
        SPECFORGE,
        SPECULATORS,
        DEEPSPEC,
        MODELOPT,
        AUTOMODEL_DSPARK,
        AUTOMODEL_EAGLE3,
        ANGELSLIM,
        EAGLE1,
    )
}


def format_named(name: str) -> Format:
    """Return the layout called `name`; FormatError listing all names where there is none."""
    if name not in FORMATS:
        raise FormatError(f"unknown layout {name!r}; expected one of {', '.join(FORMATS)}.")
    return FORMATS[name]
