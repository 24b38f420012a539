"""Norms that neither overflow nor underflow; the precision and device of small linear algebra.

The squares of float32 numbers below 1e-19 underflow and above 1e19 overflow, and `vector_norm`
squares in the precision of its input. Some devices have no float64.
"""

from __future__ import annotations

from functools import cache
from math import inf

import torch
from torch import Tensor

from torchdeq._torch import function_transforms_active

HOST = torch.device("cpu")
_FEW = 256  # up to this many numbers, Python comparisons are faster than a reduction
_LARGE, _BLOCKS = 1 << 20, 16  # numbers in a matrix whose products are taken in so many blocks
#: Norms so moderate that no square has overflowed or underflowed, for rows of any length.
_RANGE = {torch.float32: (2.0**-50, 2.0**60), torch.float64: (2.0**-460, 2.0**500)}
#: Norms so moderate that their products stay in range during a whole solve.
_ORDINARY = {torch.float32: (2.0**-30, 2.0**30), torch.float64: (2.0**-300, 2.0**300)}


def has_double(device: torch.device) -> bool:
    """Return whether a device has float64; Apple's GPUs do not."""
    return _has_double(device.type)


@cache
def _has_double(kind: str) -> bool:
    try:
        torch.zeros((), dtype=torch.float64, device=kind)
    except (TypeError, RuntimeError):
        return False
    return True


def reads_are_free(device: torch.device) -> bool:
    """Return whether values can be read without waiting: they are in the memory of the host."""
    return device == HOST and not function_transforms_active()


def small_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for small linear algebra on a device: the most precise one it has."""
    return torch.float64 if has_double(device) else torch.float32


def to_host(t: Tensor) -> Tensor:
    """Return a float64 copy on the host; waits for the device.

    The conversion runs on the host: the device may have no float64.
    """
    return t.to(HOST).to(torch.float64)


def from_host(t: Tensor, like: Tensor) -> Tensor:
    """Return a tensor from the host with the dtype and device of `like`."""
    return t.to(like.dtype).to(like.device)


def row_dot(a: Tensor, b: Tensor) -> Tensor:
    """Return (B, 1) the inner products of the rows of two matrices (B, D).

    A product and a sum are faster than `torch.bmm`; for large matrices they go block by block, so
    that the product needs little memory and stays in the cache.
    """
    if a.numel() <= _LARGE:
        return (a * b).sum(1, keepdim=True)
    blocks = zip(a.chunk(_BLOCKS, 1), b.chunk(_BLOCKS, 1), strict=True)
    return torch.stack([(p * q).sum(1, keepdim=True) for p, q in blocks]).sum(0)


def norm_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of norms: float32 or better."""
    return dtype if dtype in _RANGE else torch.float32


def plain_norm(t: Tensor, out: Tensor) -> None:
    """Write the Euclidean norms over the last dimension, whose squares may leave the range."""
    torch.linalg.vector_norm(t, dim=-1, dtype=None if t.dtype == out.dtype else out.dtype, out=out)


def plain_norms(t: Tensor) -> Tensor:
    """Return the Euclidean norms over the last dimension, whose squares may leave the range."""
    return _norm(t, norm_dtype(t.dtype), keepdim=False)


def row_norm(t: Tensor, keepdim: bool = False) -> Tensor:
    """Return the Euclidean norm over the last dimension, in float32 or better.

    The norm is correct wherever it is representable (1e-38 to 1e38 in float32). On the host, the
    usual sum of squares comes first, and a safe one if the result shows that squares may have
    overflowed or underflowed. On other devices, where reading the result would wait, the sum is
    computed in float64, or with rows scaled by their largest entry.
    """
    wide = norm_dtype(t.dtype)
    if not reads_are_free(t.device):
        return _safe(t, wide, keepdim)
    low, high = _RANGE[wide]
    norm = _norm(t, wide, keepdim)
    if _within(norm, low, high):
        return norm
    # Decide for each row: even the last digit of a norm must not depend on other rows.
    return torch.where((norm >= low) & (norm <= high), norm, _safe(t, wide, keepdim))


def in_range(norm: Tensor) -> bool:
    """Return whether plain norms are safe: no square can have left the range. Reads the values."""
    return _within(norm.flatten(), *_RANGE[norm.dtype])


def bounds_in_range(low: list[float], high: list[float], dtype: torch.dtype) -> bool:
    """Return whether plain norms between such bounds are safe: no square has left the range."""
    least, most = _RANGE[dtype]
    return all(least <= value for value in low) and all(value <= most for value in high)


def outside_range(norm: Tensor) -> Tensor:
    """Return which plain norms may be wrong: a square may have left the range, or is NaN."""
    low, high = _RANGE[norm.dtype]
    return ~((norm >= low) & (norm <= high))


def are_moderate(norm: Tensor) -> bool:
    """Return whether products of two such norms stay in range during a solve. Reads the values."""
    return _within(norm, *_ORDINARY[norm.dtype])


def unit_rows(t: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of (B, D) scaled to norm 1, and their norms, (B, 1); a zero row stays."""
    norm = row_norm(t, keepdim=True)
    return (t / torch.where(norm == 0, 1.0, norm)).to(t.dtype), norm


def unit_scale(t: Tensor) -> Tensor | None:
    """Return (B, 1) powers of two that scale the rows of (B, D) to a norm near 1.

    None if all rows have moderate norms and the host can see this without waiting for a device.
    Rows whose norm is zero or not finite get 1.
    """
    norm = row_norm(t, keepdim=True)
    if reads_are_free(t.device) and _within(norm, *_ORDINARY[norm.dtype]):
        return None
    exponent = torch.log2(norm).floor().clamp(-125, 125)
    return torch.where((norm > 0) & (norm < inf), torch.exp2(-exponent), 1.0)


def units_with(units: Tensor | None, rows: Tensor, new: Tensor | None, batch: int) -> Tensor:
    """Return (B, 1) scales in which those of some rows are replaced.

    Args:
        units: (B, 1) the scales so far; None for 1.
        rows: the numbers of the rows.
        new: (n, 1) their scales; None for 1.
        batch: B.
    """
    like = units if new is None else new
    assert like is not None, "one of the two has values"
    units = like.new_ones(batch, 1) if units is None else units.to(like.dtype)
    return units.index_copy(0, rows, like.new_ones(len(rows), 1) if new is None else new)


def _norm(t: Tensor, dtype: torch.dtype, keepdim: bool) -> Tensor:
    """Return the plain Euclidean norm over the last dimension, computed in `dtype`."""
    cast = None if t.dtype == dtype else dtype  # passing the same dtype costs 20 % more time
    norm: Tensor = torch.linalg.vector_norm(t, dim=-1, keepdim=keepdim, dtype=cast)
    return norm


def _safe(t: Tensor, wide: torch.dtype, keepdim: bool) -> Tensor:
    """Return norms in the dtype `wide` whose squares neither overflow nor underflow."""
    if wide == torch.float32 and has_double(t.device):
        return _norm(t, torch.float64, keepdim).to(wide)
    return _scaled(t.to(wide), keepdim)


def _within(norm: Tensor, low: float, high: float) -> bool:
    """Return whether all norms lie between two numbers. Reads the values.

    A NaN gives False if it comes first; a later NaN is ignored.
    """
    if norm.numel() > _FEW:
        norm = torch.stack(torch.aminmax(norm))
    values = norm.tolist() if norm.dim() == 1 else norm.flatten().tolist()
    return not values or (low <= min(values) and max(values) <= high)


def _scaled(t: Tensor, keepdim: bool) -> Tensor:
    """Return the norms of rows, computed from rows divided by their largest entry."""
    if not t.numel():
        return _norm(t, t.dtype, keepdim)
    largest = t.abs().amax(-1, keepdim=True)
    scale = torch.where((largest > 0) & (largest < inf), largest, 1.0)
    norm = _norm(t / scale, t.dtype, True) * scale
    return norm if keepdim else norm.squeeze(-1)
