"""A slice of the residual around a state, for a picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from torchdeq.checks import require, require_whole
from torchdeq.diagnostics.guarding import leaving_modules
from torchdeq.numbers import row_norm
from torchdeq.packed import PackedFn
from torchdeq.packing import Packing
from torchdeq.pytree import State
from torchdeq.randomness import Randomness


@dataclass(frozen=True)
class Landscape:
    r"""The residual $|f(z) - z|$ on a plane through a state $z^\star$ of each sample.

    Args:
        residuals: (B, n, n) at $z^\star + x_j a + y_i b$.
        x: (n,) coordinates along `a`, in units of $|z^\star|$; `y` is the same.
        a: (B, D) unit vectors; `b` is orthogonal to them.
        b: (B, D) unit vectors.
    """

    residuals: Tensor
    x: Tensor
    a: Tensor
    b: Tensor


@leaving_modules
@torch.no_grad()
def landscape(
    f: Callable[..., Any],
    z: State,
    args: tuple[Any, ...] = (),
    *,
    directions: tuple[Tensor, Tensor] | None = None,
    extent: float = 1.0,
    points: int = 21,
) -> Landscape:
    """Evaluate the residual of `f` on a plane through `z`: `points * points` evaluations.

    Args:
        f: called as `f(z, *args)`, or `f(*z, *args)` for a tuple or list state.
        z: the state, usually a fixed point.
        args: further arguments of `f`.
        directions: two (B, D) directions in rows of the packed state, e.g. from
            `singular_directions`; random by default, the same at every call.
        extent: how far to go, in units of the norm of each sample's state.
        points: points along each axis; an odd number includes the state itself.
    """
    require_whole("points", points, 2)
    require(extent > 0, "extent must be positive", extent)
    packing = Packing(z)
    packed, rows = PackedFn(packing, f, args), packing.pack(z).detach()
    if directions is None:
        with Randomness(rows.device).replayed():
            torch.manual_seed(0)
            directions = torch.randn_like(rows), torch.randn_like(rows)
    for direction in directions:
        require(direction.shape == rows.shape, f"directions must be {tuple(rows.shape)} each",
                tuple(direction.shape))  # fmt: skip
    a = normalize(directions[0].to(rows), dim=1)
    b = normalize(directions[1].to(rows), dim=1)
    b = b - (b * a).sum(1, True) * a
    independent = row_norm(a).gt(0.5) & row_norm(b).gt(100 * torch.finfo(rows.dtype).eps)
    require(independent.all(), "two directions must span a plane for every sample",
            f"dependent or zero ones for samples {(~independent).nonzero().flatten().tolist()}"
            )  # fmt: skip
    b = normalize(b, dim=1)
    size = row_norm(rows)[:, None].to(rows.dtype)
    size = torch.where(size > 0, size, 1.0)
    x = torch.linspace(-extent, extent, points, dtype=rows.dtype, device=rows.device)
    residuals = torch.stack([
        torch.stack([_residual(packed, rows + size * (s * a + t * b)) for s in x], 1) for t in x
    ], 1)  # fmt: skip
    return Landscape(residuals, x, a, b)


def _residual(f: PackedFn, z: Tensor) -> Tensor:
    return row_norm(f(z) - z)
