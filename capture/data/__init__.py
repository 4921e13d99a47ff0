"""Conversations become token ids and loss masks; what cannot is rejected with a reason."""

from .audit import Audit, audit, marked_text
from .identity import TokenisationIdentity, identity_of
from .items import Item, Reject, Sample
from .kimi import KimiMasks
from .options import TokeniseOptions
from .reject_gate import RejectGate
from .source_error import SourceError
from .source_identity import source_identity
from .tokenise import tokenise
from .tokeniser import Tokeniser

__all__ = [
    "Audit",
    "Item",
    "KimiMasks",
    "Reject",
    "RejectGate",
    "Sample",
    "SourceError",
    "TokenisationIdentity",
    "TokeniseOptions",
    "Tokeniser",
    "audit",
    "identity_of",
    "marked_text",
    "source_identity",
    "tokenise",
]
