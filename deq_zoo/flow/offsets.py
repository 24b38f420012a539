"""What a window of correlations says by itself: where the match is expected."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Offsets(nn.Module):
    r"""The expected offset of the match in every window, and how sure it is.

    $$p_l = \mathrm{softmax}(\beta_l \, C_l), \qquad o_l = 2^l \sum_k p_{lk} k, \qquad
    s_l = \sum_k p_{lk}^2$$

    with k the offsets of a window and $\beta_l$ learnt. A model that gets $o_l$ need not learn
    first how to read a window, which a short training has no time for.
    """

    def __init__(self, levels: int, radius: int) -> None:
        super().__init__()
        self.levels, self.radius = levels, radius
        self.sharpness = nn.Parameter(torch.ones(levels))

    def forward(self, corr: Tensor) -> Tensor:
        """Return (N, 3 L, h, w): offsets in pixels of the grid, then how sure they are."""
        windows = corr.unflatten(1, (self.levels, -1))  # (N, L, n^2, h, w)
        p = torch.softmax(windows * self.sharpness[:, None, None, None], dim=2)
        steps = torch.arange(-self.radius, self.radius + 1, device=p.device, dtype=p.dtype)
        offsets = torch.cartesian_prod(steps, steps)  # (n^2, 2): the slow index moves along x
        scale = 2.0 ** torch.arange(self.levels, device=p.device, dtype=p.dtype)
        mean = torch.einsum("nlkhw,kc,l->nlchw", p, offsets, scale)
        return torch.cat((mean.flatten(1, 2), p.square().sum(2)), dim=1)
