"""Conversations become token ids and loss masks; what cannot is rejected with a reason."""

from ..rejects import Reject
from .audit import Audit, RejectGate, RejectLimitError, audit, marked_text
from .encoder import RecordEncoder
from .errors import SourceError
from .identity import TokenisationIdentity, identity_of
from .images.processor import ImageProcessor, image_processor_of
from .masks.kimi import KimiMasks
from .options import TokeniseOptions
from .records.items import Item, Sample, SampleImages
from .records.sources import read_records, source_identity
from .tokenise import tokenise

__all__ = [
    "Audit",
    "ImageProcessor",
    "Item",
    "KimiMasks",
    "RecordEncoder",
    "Reject",
    "RejectGate",
    "RejectLimitError",
    "Sample",
    "SampleImages",
    "SourceError",
    "TokenisationIdentity",
    "TokeniseOptions",
    "audit",
    "identity_of",
    "image_processor_of",
    "marked_text",
    "read_records",
    "source_identity",
    "tokenise",
]
