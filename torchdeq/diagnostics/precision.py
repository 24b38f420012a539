"""The precision in which a map computes, measured from its own values."""

from __future__ import annotations

import torch
from torch import Tensor

from torchdeq.numbers import row_norm
from torchdeq.packed import PackedFn

#: Machine epsilons of the formats in which modules compute: single, half (and TF32), bfloat16.
_FORMATS = (2.0**-23, 2.0**-10, 2.0**-7)
_STEP = {torch.float64: 1e-6, torch.float32: 1e-4}  # relative steps of the difference


@torch.no_grad()
def measured_precision(f: PackedFn, z: Tensor) -> float:
    r"""Return the machine epsilon of the format in which `f` computes, by its rounding errors.

    For a smooth map, $f(z + d) - 2 f(z) + f(z - d)$ falls with $|d|^2$, and rounding does not. The
    answer is the finest known format whose rounding explains the difference, or the epsilon of
    the state. A map with jumps looks like one of low precision, rightly: its residuals do not fall
    either.

    Args:
        f: the map on rows.
        z: (B, D) a state that is not zero.
    """
    own = torch.finfo(z.dtype).eps
    if z.dtype not in _STEP or not z.numel():
        return own
    d = _STEP[z.dtype] * torch.randn_like(z) * z.square().mean(1, keepdim=True).sqrt()
    middle = f(z)
    noise = row_norm(f(z + d) - 2 * middle + f(z - d)) / row_norm(middle).clamp_min(own)
    noise = noise[noise.isfinite()]
    if not len(noise):
        return own
    error = float(noise.median())
    # Two roundings cancel in part: a format shows at about a tenth of its epsilon or more.
    coarser = [eps for eps in _FORMATS if eps > 8 * own and error > eps / 16]
    return max(coarser, default=own)
