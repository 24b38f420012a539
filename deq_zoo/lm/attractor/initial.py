"""The initialisation of the attractor: scaled orthogonal matrices, and zeros."""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

import torch
from torch import Tensor, nn

from deq_zoo.lm.attractor.layers import GatedBlock, PlainBlock


def weight_size(width: int) -> float:
    """Return the root mean square of the entries of a new matrix."""
    return sqrt(2 / (5 * width))


@torch.no_grad()
def fill_orthogonal(weight: Tensor, size: float) -> None:
    """Fill a matrix with orthonormal rows or columns times a factor: entries of one mean square."""
    rows, columns = weight.shape
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)  # QR needs it
    normal = torch.empty(max(rows, columns), min(rows, columns), dtype=dtype)
    nn.init.trunc_normal_(normal, std=1.0, a=-2.0, b=2.0)
    q, r = torch.linalg.qr(normal)
    q = q * torch.where(r.diagonal() < 0, -1.0, 1.0)
    q = q.T if rows < columns else q
    weight.copy_(q * (size * sqrt(max(rows, columns))))


def initialise_blocks(blocks: Iterable[PlainBlock], width: int, random_core: bool) -> None:
    """Fill the matrices of blocks, which begin as the identity.

    Args:
        blocks: of the whole model.
        width: D.
        random_core: gated blocks do not begin as the identity, as published.
    """
    size = weight_size(width)
    for block in blocks:
        attn, mlp = block.attn, block.mlp
        for linear in (attn.c_q, attn.c_k, attn.c_v, mlp.fc):
            fill_orthogonal(linear.weight, size)
        for linear in (attn.c_proj, mlp.proj):
            if random_core and isinstance(block, GatedBlock):
                nn.init.trunc_normal_(linear.weight, std=size, a=-3 * size, b=3 * size)
            else:
                nn.init.zeros_(linear.weight)
