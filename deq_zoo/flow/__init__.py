"""DEQ-Flow: optical flow as a fixed point (Bai et al., 2022)."""

from typing import TYPE_CHECKING

from deq_zoo.lazy import lazy_names

if TYPE_CHECKING:
    from deq_zoo.flow.config import SIZES, FlowConfig
    from deq_zoo.flow.consistency import consistent, warped
    from deq_zoo.flow.correlation import Correlation, correlate
    from deq_zoo.flow.model import DEQFlow, FlowPrediction, State

__all__ = [
    "SIZES",
    "Correlation",
    "DEQFlow",
    "FlowConfig",
    "FlowPrediction",
    "State",
    "consistent",
    "correlate",
    "warped",
]

__getattr__ = lazy_names(
    __name__,
    {
        "Correlation": "correlation",
        "DEQFlow": "model",
        "FlowConfig": "config",
        "FlowPrediction": "model",
        "SIZES": "config",
        "State": "model",
        "consistent": "consistency",
        "correlate": "correlation",
        "warped": "consistency",
    },
)
