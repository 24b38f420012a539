"""Spectral normalisation: power iteration tracks the largest singular value of a weight."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchdeq.autocast import AutocastState
from torchdeq.checks import require_whole
from torchdeq.norm.base import NORMS, Norm
from torchdeq.norm.computed import Parts
from torchdeq.norm.targets import Targets, common_targets


@NORMS.register("spectral_norm")
@dataclass(frozen=True)
class SpectralNorm(Norm):
    r"""Spectral normalisation (Miyato et al., 2018) with a scale per row.

    $$W_i = V_i \min(t, g_i / \sigma), \qquad \sigma = u^\top V v$$

    where $V$ is the weight as a matrix, with its rows (the dimension in `dims`) first. `u` and `v`
    start at the leading singular vectors of $V$. Each call in training mode advances them by power
    iteration, whether gradients are on or off; in evaluation they do not change. Autograd treats
    them as constants. `g` starts at `target_norm`. Parameters: `weight_orig` and `weight_g`;
    buffers: `weight_u` and `weight_v`. The other options are those of `Norm`.

    Args:
        n_power_iterations: steps of power iteration per call. The estimate lags behind weights that
            change fast: with one step the norm of `W` can be above `target_norm` for a while.
        eps: a vector shorter than this is not normalised; the previous estimate stays.
    """

    n_power_iterations: int = 1
    eps: float = 1e-12

    _target_modules: ClassVar[Targets] = common_targets()
    suffixes: ClassVar[tuple[str, ...]] = ("orig", "g", "u", "v")
    raw: ClassVar[str] = "orig"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("n_power_iterations", self.n_power_iterations)

    def split(self, weight: Tensor, dim: int) -> Parts:
        matrix = _matrix(weight, dim)
        with _full_precision(matrix):
            u, v = (x.to(weight.dtype) for x in leading_singular_vectors(matrix))
        if not self.learn_scale:
            return {"orig": weight, "u": u, "v": v}
        rows = [size if d == dim % weight.dim() else 1 for d, size in enumerate(weight.shape)]
        g = _bilinear(u, matrix, v).expand(rows).clone()
        return {"orig": weight, "g": g, "u": u, "v": v}

    def start(self, parts: Parts) -> Parts:
        if self.learn_scale:
            parts["g"].fill_(self.target_norm)
        return parts

    def weight(self, parts: Parts, dim: int) -> Tensor:
        # Copies: the next call, or DDP, may write into the buffers before the backward pass of this
        # call. The dtype: a copy of a model that was moved may have buffers of its former dtype.
        u, v = (parts[suffix].to(parts["orig"], copy=True) for suffix in ("u", "v"))
        sigma = _bilinear(u, _matrix(parts["orig"], dim), v)
        return self._scale(parts["orig"], sigma, parts.get("g"))

    @torch.no_grad()
    def advance(self, parts: Parts, dim: int) -> None:
        matrix, u, v = _matrix(parts["orig"], dim), parts["u"], parts["v"]
        with _full_precision(matrix):
            for _ in range(self.n_power_iterations):
                v.copy_(self._unit(matrix.mT @ u, v))
                u.copy_(self._unit(matrix @ v, u))

    def _unit(self, x: Tensor, previous: Tensor) -> Tensor:
        """Return `x` normalised, or `previous` if `x` is zero: a zero vector would stay zero."""
        length = torch.linalg.vector_norm(x)
        return torch.where(length > self.eps, x / length, previous)


def _matrix(weight: Tensor, dim: int) -> Tensor:
    """Return the weight as a matrix, with its rows first."""
    if weight.dim() == 2 and dim == 0:
        return weight
    return weight.movedim(dim, 0).reshape(weight.shape[dim], -1)


def _full_precision(matrix: Tensor) -> AbstractContextManager[Any]:
    """Return a block without autocast (which raises for the meta device)."""
    return nullcontext() if matrix.is_meta else AutocastState(matrix.device).suspended()


def _bilinear(u: Tensor, matrix: Tensor, v: Tensor) -> Tensor:
    r"""Return $u^\top M v$."""
    with _full_precision(matrix):
        return u @ (matrix @ v)


@torch.no_grad()
def leading_singular_vectors(matrix: Tensor, steps: int = 64) -> tuple[Tensor, Tensor]:
    r"""Return the vectors $u$, $v$ of the largest singular value $\sigma = u^\top M v$.

    They are the best ones in a Krylov space of $M^\top M$: exact for up to 64 rows or columns, and
    close where power iteration would need thousands of steps. The start is fixed, so torch's global
    generator does not advance.
    """
    if matrix.is_meta or not matrix.numel():
        return matrix.new_zeros(matrix.shape[0]), matrix.new_zeros(matrix.shape[1])
    # Uninitialised weights, to be loaded later, may contain NaN: replace it by zero.
    m = torch.nan_to_num(matrix.to(torch.promote_types(matrix.dtype, torch.float32)), 0.0, 0.0, 0.0)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(m.shape[1], generator=generator, dtype=torch.float64).to(m)
    basis = m.new_zeros(0, m.shape[1])
    for _ in range(min(steps, *m.shape) + 1):
        length = torch.linalg.vector_norm(x)
        for _ in range(2):  # after one pass, rounding leaves components along the basis
            x = x - (basis @ x) @ basis
        rest = torch.linalg.vector_norm(x)
        if not rest > 10 * torch.finfo(m.dtype).eps * length:
            break  # only rounding is left: the space is complete
        basis = torch.cat([basis, (x / rest).unsqueeze(0)])
        x = m.mT @ (m @ basis[-1])
    U, _, Vh = torch.linalg.svd(m @ basis.mT, full_matrices=False)
    return U[:, 0].contiguous(), Vh[0] @ basis
