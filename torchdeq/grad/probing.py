"""The test for samples that depend on each other: two products with a linear map."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from torchdeq.numbers import unit_rows

ROUNDINGS = 64  # rounding errors by which two products of the same rows may differ


def probe_coupling(
    product: Callable[[Tensor], Tensor], rows: Tensor, batch: int, eps: float, rank: int = 0
) -> tuple[Tensor, bool]:
    """Return the product with the rows, and whether two products show that rows are coupled.

    If rows are independent, the product scales with each row. Coupling that acts only through
    further products is not visible here.

    Args:
        product: a linear map of (N B, D).
        rows: (N B, D) the rows of N batches.
        batch: the number B of rows in each batch.
        eps: the precision of the product.
        rank: the number of this process; rows of other processes get other factors, so that
            coupling with them is visible, too.
    """
    b, size = unit_rows(rows)
    factors = _factors(batch, rank, b.dtype, b.device).repeat(len(rows) // max(1, batch), 1)
    first, second = product(b), product(factors * b)
    return first * size, _differ(second, factors * first, eps)


@cache
def _factors(batch: int, rank: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return (B, 1) signed powers of two, different for rows that are near each other.

    Multiplying a row by a power of two is exact, so products of independent rows scale exactly.
    """
    steps = 8 if dtype == torch.float16 else 32  # exponents that leave room for the product
    i = torch.arange(batch) + 13 * rank
    kind = (i + 7 * (i // (2 * steps))) % (2 * steps)
    signs = torch.where(kind % 2 == 0, 1.0, -1.0)
    return (signs * 2.0 ** (kind // 2 - steps // 2)).to(device, dtype)[:, None]


def _differ(a: Tensor, b: Tensor, eps: float) -> bool:
    """Return whether rows differ by more than rounding; this reads from the device."""
    if not a.numel():
        return False
    error = (a - b).abs().amax(1)
    size = torch.maximum(a.abs().amax(1), b.abs().amax(1))
    return bool((error > ROUNDINGS * eps * size).any())  # a NaN never counts
