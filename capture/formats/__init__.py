"""Other trainers' files, written from our rows and read back into them."""

from .errors import FormatError, LayoutError
from .export import ExportSummary, export_dataset
from .importing import ImportSummary, import_dataset
from .registry import FORMATS
from .settings import ExportSettings, ImportSettings

__all__ = [
    "FORMATS",
    "ExportSettings",
    "ExportSummary",
    "FormatError",
    "ImportSettings",
    "ImportSummary",
    "LayoutError",
    "export_dataset",
    "import_dataset",
]
