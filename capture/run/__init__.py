"""The offline run: plan, batches, forward, rows on disk."""

from .offline import capture_dataset
from .progress import Progress, Silent
from .settings import CaptureSettings, TextSettings
from .summary import RunSummary

__all__ = ["CaptureSettings", "Progress", "RunSummary", "Silent", "TextSettings", "capture_dataset"]
