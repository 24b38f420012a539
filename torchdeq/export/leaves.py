"""The tensors of a state in a graph: norms, products and masks, one number for each sample.

A sample is a row of the batch, or the whole batch if its rows are one coupled system. No function
reads the size of the batch, so that a loop can use them for batches of every size.
"""

from __future__ import annotations

import torch
from torch import Tensor

Leaves = tuple[Tensor, ...]


def norm(leaves: Leaves, joint: bool, dtype: torch.dtype | None = None) -> Tensor:
    """Return (b,) the Euclidean norm of each sample, over all tensors of a state.

    Args:
        leaves: the tensors.
        joint: whether the batch is one sample.
        dtype: the precision of the norm; None for that of the tensors.
    """
    norms = [_norm(t, joint, dtype) for t in leaves]
    if len(norms) == 1:
        return norms[0]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), dim=0)
    return total


def dots(history: Leaves, leaves: Leaves, joint: bool, dtype: torch.dtype) -> Tensor:
    """Return (m, b) the inner products of `m` earlier states with a state.

    Args:
        history: tensors (m, B, ...).
        leaves: tensors (B, ...).
        joint: whether the batch is one sample.
        dtype: the precision of the products.
    """
    parts = []
    for past, t in zip(history, leaves, strict=True):
        product = past.to(dtype) * t.to(dtype)
        dims = tuple(range(1 if joint else 2, product.dim()))
        part = product.sum(dims) if dims else product
        parts.append(part.view(-1, 1) if joint or not t.dim() else part)
    return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]


def spread(values: Tensor, like: Tensor, joint: bool, first: int = 0) -> Tensor:
    """Return one number for each sample such that it broadcasts with a tensor of the state.

    Args:
        values: (..., b), with `first` dimensions before that of the samples.
        like: a tensor of the state, without these dimensions.
        joint: whether the batch is one sample.
        first: the number of dimensions before that of the samples.
    """
    if joint or not like.dim():
        values = values.squeeze(first)
        return values[(..., *(None,) * like.dim())]
    return values[(..., *(None,) * (like.dim() - 1))]


def _norm(t: Tensor, joint: bool, dtype: torch.dtype | None) -> Tensor:
    if dtype is not None:
        t = t.to(dtype)
    dims = tuple(range(0 if joint else 1, t.dim()))
    size: Tensor = torch.linalg.vector_norm(t, dim=dims) if dims else t.abs()
    return size.view(1) if joint or not t.dim() else size
