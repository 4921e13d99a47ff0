"""The offline run: plan, batches, forward, rows on disk."""

from ..settings import TextSettings
from .estimate import RunEstimate, estimate_run
from .offline import capture_dataset
from .settings import CaptureSettings, RayWorkers
from .stopping import RunStopped, Stopping
from .summary import RunSummary

__all__ = [
    "CaptureSettings",
    "RayWorkers",
    "RunEstimate",
    "RunStopped",
    "RunSummary",
    "Stopping",
    "TextSettings",
    "capture_dataset",
    "estimate_run",
]
