"""Several linear maps of the same input as one product, where nobody has changed one of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deq_zoo.plain_layers import is_plain


def joint_linear(x: Tensor, layers: Sequence[nn.Linear]) -> Tensor:
    """Return the outputs (..., sum of D_i) of linear layers without bias, side by side.

    Args:
        x: (..., D) the input of all.
        layers: the layers. If all are plain, one product takes the place of one for each.
    """
    if all(map(is_plain, layers)):
        return F.linear(x, torch.cat([layer.weight for layer in layers]))
    return torch.cat([layer(x) for layer in layers], dim=-1)
