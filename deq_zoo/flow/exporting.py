"""DEQ-Flow for other programs: two frames of one size in, the flow between them out."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from deq_zoo.checks import check_fields
from deq_zoo.exportable import Exportable
from deq_zoo.flow.model import DEQFlow

_BEFORE = (
    "Two frames of facts.height x facts.width pixels, colours red, green, blue, as floats from 0 "
    "to 255. Other sizes need another export with --height and --width."
)
_AFTER = (
    "The flow leads from each pixel of the first frame to its place in the second, in pixels: "
    "channel 0 along x, channel 1 along y."
)


@dataclass(frozen=True)
class FrameSize:
    """The options of an export.

    Args:
        height: of the frames; 0 takes that of the training crops.
        width: of the frames; 0 takes that of the training crops.
    """

    height: int = 0
    width: int = 0

    def __post_init__(self) -> None:
        check_fields(self, 0, "height", "width")


class FlowOf(nn.Module):
    """A DEQ-Flow that returns its flow; batches of every size keep their correlations."""

    def __init__(self, model: DEQFlow) -> None:
        super().__init__()
        self.model = copy(model)  # a shallow copy, with the same weights
        if model.config.correlation == "auto":  # whose choice depends on the size of the batch
            self.model.config = replace(model.config, correlation="volume")

    def forward(self, frame1: Tensor, frame2: Tensor) -> dict[str, Tensor]:
        return {"flow": self.model((frame1, frame2)).prediction}


def make_export(model: DEQFlow, height: int, width: int) -> Exportable:
    """Return a DEQ-Flow as other programs call it, for frames of one size."""
    rng = torch.Generator().manual_seed(0)
    frames = (255 * torch.rand(2, 3, height, width, generator=rng) for _ in range(2))
    return Exportable(
        FlowOf(model),
        dict(zip(("frame1", "frame2"), frames, strict=True)),
        {"frame1": "the first frames", "frame2": "the next frames", "flow": "in pixels"},
        _BEFORE,
        _AFTER,
        {"height": height, "width": width},
    )
