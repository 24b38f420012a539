"""The running average of the weights, with which evaluation computes."""

from __future__ import annotations

from copy import deepcopy

import torch

from deq_zoo.reason.core import Core


def as_buffers(core: Core) -> Core:
    """Return a copy whose weights are buffers, of the same names: no optimiser trains them."""
    copied = deepcopy(core)
    for part in copied.modules():
        for name, weight in list(part.named_parameters(recurse=False)):
            delattr(part, name)
            part.register_buffer(name, weight.detach().clone())
    return copied


@torch.no_grad()
def blend(average: Core, core: Core, decay: float) -> None:
    """Set the average to `decay` times itself plus the rest of the present weights."""
    own = dict(average.named_buffers())
    for name, weight in core.named_parameters():
        own[name].lerp_(weight.detach(), 1 - decay)
