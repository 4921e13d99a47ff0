"""Conversations become token ids and loss masks; what cannot is rejected with a reason."""

from .audit import Audit, audit, marked_text
from .identity import TokenisationIdentity, identity_of
from .image_processor import ImageProcessor, image_processor_of
from .items import Item, Reject, Sample
from .kimi import KimiMasks
from .options import TokeniseOptions
from .reject_gate import RejectGate
from .sample_images import SampleImages
from .source_error import SourceError
from .source_identity import source_identity
from .tokenise import tokenise
from .tokeniser import Tokeniser

__all__ = [
    "Audit",
    "ImageProcessor",
    "Item",
    "KimiMasks",
    "Reject",
    "RejectGate",
    "Sample",
    "SampleImages",
    "SourceError",
    "TokenisationIdentity",
    "TokeniseOptions",
    "Tokeniser",
    "audit",
    "identity_of",
    "image_processor_of",
    "marked_text",
    "source_identity",
    "tokenise",
]
