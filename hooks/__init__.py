"""Taps on a model's layers, reading of the residual stream, early stop."""

from .collector import Collector, drop_inert_hooks
from .company import Company
from .company_probe import AtOnce, one_after_the_other
from .compiled import compiled_layers
from .errors import TapError
from .logits import LogitsHead, TopLogits, find_logits_head
from .positions import (
    Held,
    LengthTypeError,
    PositionsError,
    RealPositions,
    has_state,
    lone_pad_id,
    real_before,
    real_positions,
)
from .slots import ClonedStates, GatheredRows
from .tap import ActiveTap, Captured, tap
from .tapped_model import TappedModel, find_taps, find_taps_without_weights
from .taps import Final, Taps, with_post_norm
from .truth import FinalNorm, Truth, Watch, probe

__all__ = [
    "ActiveTap",
    "AtOnce",
    "Captured",
    "ClonedStates",
    "Collector",
    "Company",
    "Final",
    "FinalNorm",
    "GatheredRows",
    "Held",
    "LengthTypeError",
    "LogitsHead",
    "PositionsError",
    "RealPositions",
    "TapError",
    "TappedModel",
    "Taps",
    "TopLogits",
    "Truth",
    "Watch",
    "compiled_layers",
    "drop_inert_hooks",
    "find_logits_head",
    "find_taps",
    "find_taps_without_weights",
    "has_state",
    "lone_pad_id",
    "one_after_the_other",
    "probe",
    "real_before",
    "real_positions",
    "tap",
    "with_post_norm",
]
