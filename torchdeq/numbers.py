"""Norms that neither overflow nor underflow, and where the small algebra of a solver lives.

Squares of float32 numbers leave the range below 1e-19 and above 1e19, and `vector_norm` squares in
the precision of its input. Some devices have no float64 at all.
"""

from __future__ import annotations

from functools import cache
from math import inf

import torch
from torch import Tensor

from torchdeq._torch import function_transforms_active

HOST = torch.device("cpu")
_FEW = 256  # numbers that are compared one by one
#: Norms in which no square can have left the range, whatever the length of a row.
_RANGE = {torch.float32: (2.0**-50, 2.0**60), torch.float64: (2.0**-460, 2.0**500)}
#: Norms whose products with each other stay in the range over a whole solve.
_ORDINARY = {torch.float32: (2.0**-30, 2.0**30), torch.float64: (2.0**-300, 2.0**300)}


def has_double(device: torch.device) -> bool:
    """Return whether a device has float64 numbers; Apple's GPUs have none."""
    return _has_double(device.type)


@cache
def _has_double(kind: str) -> bool:
    try:
        torch.zeros((), dtype=torch.float64, device=kind)
    except (TypeError, RuntimeError):
        return False
    return True


def reads_are_free(device: torch.device) -> bool:
    """Return whether looking at a number waits for nothing: the host's own memory."""
    return device == HOST and not function_transforms_active()


def small_dtype(device: torch.device) -> torch.dtype:
    """Return the precision of small algebra that stays on a device: the best it has."""
    return torch.float64 if has_double(device) else torch.float32


def to_host(t: Tensor) -> Tensor:
    """Return a copy in float64 on the host, where it is widened; waits for the device."""
    return t.to(HOST).to(torch.float64)


def from_host(t: Tensor, like: Tensor) -> Tensor:
    """Return a tensor of the host in the precision and on the device of another one."""
    return t.to(like.dtype).to(like.device)


def row_norm(t: Tensor, keepdim: bool = False) -> Tensor:
    """Return the Euclidean norm over the last dimension, in float32 or better.

    Right wherever the norm itself is in range (1e-38 to 1e38 in float32). On the host the usual sum
    is tried first and done again if it says that squares may have left the range; elsewhere, where
    looking would wait for the device, the sum is made in float64, or relative to the largest entry.
    """
    wide = t.dtype if t.dtype in _RANGE else torch.float32
    if not reads_are_free(t.device):
        return _safe(t, wide, keepdim)
    low, high = _RANGE[wide]
    norm = _norm(t, wide, keepdim)
    if _within(norm, low, high):
        return norm
    # Row by row: the last digit of a norm must not depend on other rows.
    return torch.where((norm >= low) & (norm <= high), norm, _safe(t, wide, keepdim))


def in_range(norm: Tensor) -> bool:
    """Return whether plain norms are right: no square can have left the range; reads them."""
    return _within(norm.flatten(), *_RANGE[norm.dtype])


def unit_scale(t: Tensor) -> Tensor | None:
    """Return (B, 1) powers of two that bring the rows of (B, D) to a length near 1.

    None if every row may well stay as it is, as far as that is known without waiting for a device.
    Rows without a length (zero, not finite) get 1.
    """
    norm = row_norm(t, keepdim=True)
    if reads_are_free(t.device) and _within(norm, *_ORDINARY[norm.dtype]):
        return None
    exponent = torch.log2(norm).floor().clamp(-125, 125)
    return torch.where((norm > 0) & (norm < inf), torch.exp2(-exponent), 1.0)


def _norm(t: Tensor, dtype: torch.dtype, keepdim: bool) -> Tensor:
    named = None if t.dtype == dtype else dtype  # naming it costs a fifth
    norm: Tensor = torch.linalg.vector_norm(t, dim=-1, keepdim=keepdim, dtype=named)
    return norm


def _safe(t: Tensor, wide: torch.dtype, keepdim: bool) -> Tensor:
    """Return norms that no square can spoil."""
    if wide == torch.float32 and has_double(t.device):
        return _norm(t, torch.float64, keepdim).to(wide)
    return _scaled(t.to(wide), keepdim)


def _within(norm: Tensor, low: float, high: float) -> bool:
    """Return whether all norms lie between two numbers; reads them.

    False if a NaN comes first; one that comes later is passed over.
    """
    if norm.numel() > _FEW:
        norm = torch.stack(torch.aminmax(norm))
    values = norm.tolist() if norm.dim() == 1 else norm.flatten().tolist()
    return not values or (low <= min(values) and max(values) <= high)


def _scaled(t: Tensor, keepdim: bool) -> Tensor:
    """Return the norm of rows divided by their largest entry, times that entry."""
    if not t.numel():
        return _norm(t, t.dtype, keepdim)
    top = t.abs().amax(-1, keepdim=True)
    unit = torch.where((top > 0) & (top < inf), top, 1.0)
    norm = _norm(t / unit, t.dtype, True) * unit
    return norm if keepdim else norm.squeeze(-1)
