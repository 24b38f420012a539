"""The tiny model of the golden case, with the weights that its numbers were computed with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deq_zoo.flow import DEQFlow, FlowConfig
from deq_zoo.flow.convert import from_authors
from tests.golden import load_tensors

MODEL = "deq-flow"


def make_model(
    deq: Any, gma: bool = False, dtype: torch.dtype = torch.float32, **config: Any
) -> DEQFlow:
    """Build the tiny model with the golden weights, in evaluation mode."""
    state = load_tensors(MODEL, "weights_tiny")
    if gma:
        state |= load_tensors(MODEL, "weights_tiny_gma_extra")
    model = DEQFlow(FlowConfig(size="tiny", gma=gma, **config), deq).to(dtype)
    model.load_state_dict(from_authors(state))
    return model.eval()


def pick_images(io: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return both images of the golden case, in 0 to 255."""
    return io["image1"].to(dtype), io["image2"].to(dtype)
