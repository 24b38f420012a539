"""DEQ-Flow: optical flow as a fixed point (Bai et al., 2022)."""

from deq_zoo.flow.consistency import consistent, warped
from deq_zoo.flow.correlation import Correlation, correlate
from deq_zoo.flow.model import SIZES, DEQFlow, FlowConfig, FlowOutput, State

__all__ = [
    "SIZES",
    "Correlation",
    "DEQFlow",
    "FlowConfig",
    "FlowOutput",
    "State",
    "consistent",
    "correlate",
    "warped",
]
