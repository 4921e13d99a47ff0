"""How values leave a model: taps on its layers, the residual stream read from a layer, early stop."""

from .causality import require_causal
from .collector import Collector, drop_inert_hooks
from .compiled import compiled_layers
from .errors import TapError
from .logits import LogitsHead, TopLogits, find_logits_head
from .positions import PositionsError, RealPositions, lone_pad_id, real_positions
from .slots import ClonedStates, GatheredRows
from .tap import ActiveTap, Captured, tap
from .taps import Final, Taps
from .truth import FinalNorm, Truth, Watch, probe

__all__ = [
    "ActiveTap",
    "Captured",
    "ClonedStates",
    "Collector",
    "Final",
    "FinalNorm",
    "GatheredRows",
    "LogitsHead",
    "PositionsError",
    "RealPositions",
    "TapError",
    "Taps",
    "TopLogits",
    "Truth",
    "Watch",
    "compiled_layers",
    "drop_inert_hooks",
    "find_logits_head",
    "lone_pad_id",
    "probe",
    "real_positions",
    "require_causal",
    "tap",
]
