"""DEQ-Flow: optical flow as a fixed point (Bai et al., 2022)."""

from typing import TYPE_CHECKING

from deq_zoo.lazy import lazy_names

if TYPE_CHECKING:
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

__getattr__ = lazy_names(
    __name__,
    {
        "Correlation": "correlation",
        "DEQFlow": "model",
        "FlowConfig": "model",
        "FlowOutput": "model",
        "SIZES": "model",
        "State": "model",
        "consistent": "consistency",
        "correlate": "correlation",
        "warped": "consistency",
    },
)
