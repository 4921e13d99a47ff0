"""Whether a folder holds what it says: its files, and its values beside those of the model."""

from .report import Report, TapAgreement
from .verification import verify

__all__ = ["Report", "TapAgreement", "verify"]
