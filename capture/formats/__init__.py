"""Other trainers' files, written from our rows and read back into them."""

from .errors import FormatError, LayoutError
from .export import ExportSummary, export_dataset
from .export_check import ExportCheck, check_export, is_export
from .importing import ImportSummary, import_dataset
from .registry import FORMATS
from .settings import ExportSettings, ImportSettings

__all__ = [
    "FORMATS",
    "ExportCheck",
    "ExportSettings",
    "ExportSummary",
    "FormatError",
    "ImportSettings",
    "ImportSummary",
    "LayoutError",
    "check_export",
    "export_dataset",
    "import_dataset",
    "is_export",
]
