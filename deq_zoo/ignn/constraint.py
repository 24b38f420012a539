"""The constraint that makes an implicit layer well-posed: rows of W in a ball of the graph."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class WellPosedness(NamedTuple):
    """The distance of a layer from losing its fixed point on a graph.

    Args:
        bound: (G,) `||W||_inf` times the Perron root: below 1, there is exactly one fixed point,
            and plain iteration converges to it.
        density: share of the entries of W that are not zero, over all graphs.
    """

    bound: Tensor
    density: float


def project_rows(W: Tensor, radius: float | Tensor) -> Tensor:
    r"""Return the nearest matrix whose rows have absolute sums of at most `radius`.

    $$w \leftarrow \mathrm{sign}(w) \max(|w| - s, 0), \qquad
    s = \frac{1}{k} \Bigl(\sum_{i \le k} |w|_{(i)} - r\Bigr)$$

    for every row outside, with k the last place in falling order at which $|w|_{(k)}$ exceeds
    $s$. Rows inside are returned as they are. This is the projection onto the ball of
    $\|W\|_\infty$.

    Args:
        W: (..., m, n).
        radius: a positive number, or a tensor that broadcasts, e.g. (G, 1, 1) for a ball per graph.
    """
    w = W.to(torch.promote_types(W.dtype, torch.float32))
    r = torch.as_tensor(radius, dtype=w.dtype, device=w.device)
    size = w.abs()
    falling = size.sort(dim=-1, descending=True).values
    places = torch.arange(1, w.shape[-1] + 1, device=w.device)
    means = (falling.cumsum(-1) - r) / places
    k = (falling > means).sum(-1, keepdim=True)
    s = means.gather(-1, (k - 1).clamp_min(0))  # k = 0 only where there is a NaN
    shrunk = w.sign() * (size - s).clamp_min(0)
    return torch.where(size.sum(-1, keepdim=True) <= r, w, shrunk).to(W.dtype)


def projected_through(W: Tensor, radius: float | Tensor) -> Tensor:
    """Return `project_rows(W)`; gradients pass through as through the identity."""
    # The term added is zero: W plus a difference would round at the scale of W.
    return project_rows(W.detach(), radius) + (W - W.detach())
