"""Verification of a folder: its files, and its values beside those of the model."""

from .fault_lines import fault_lines
from .report import Report, TapAgreement
from .verification import verify

__all__ = ["Report", "TapAgreement", "fault_lines", "verify"]
