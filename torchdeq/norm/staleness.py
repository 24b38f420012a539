"""Stale weights: parameters have changed since a norm computed the weight from them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchdeq.norm.base import Norm


@torch.no_grad()
def stale_norms(module: nn.Module) -> list[str]:
    """Return the names of the weights of a module that its norm would compute differently now.

    Only the module itself counts, not its submodules. A norm of another library is never stale.
    """
    norm = module.__dict__.get("_deq_norm")
    if not isinstance(norm, Norm):
        return []
    stale = []
    for name, dim in norm.items():
        weight = module.__dict__.get(name)
        if not isinstance(weight, Tensor):
            continue
        parts = {
            suffix: getattr(module, f"{name}_{suffix}")
            for suffix in norm.suffixes
            if suffix != "g" or norm.learn_scale
        }
        now = norm.weight(parts, dim)
        scale = float(now.abs().max()) if now.numel() else 0.0
        eps = torch.finfo(now.dtype).eps
        if not torch.allclose(now, weight, rtol=0, atol=64 * eps * scale, equal_nan=True):
            stale.append(name)
    return stale
