"""Spectral normalisation: the largest singular value, followed by power iteration."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchdeq.autocast import AutocastState
from torchdeq.norm.base import NORMS, Norm, Targets, common_targets
from torchdeq.norm.computed import Parts


@NORMS.register("spectral_norm")
@dataclass(frozen=True)
class SpectralNorm(Norm):
    r"""Spectral normalisation (Miyato et al., 2018) with a scale per row.

    .. math:: W_i = V_i \min(t, g_i / \sigma), \qquad \sigma = u^\top V v

    with ``V`` as a matrix, the rows of ``dims`` first. ``u`` and ``v`` start at the leading
    singular vectors of ``V`` and advance by power iteration at every call in training mode, with or
    without gradients; in evaluation they stay. They are constants to autograd. ``g`` starts at
    ``target_norm``. Parameters: ``weight_orig`` and ``weight_g``; buffers: ``weight_u``,
    ``weight_v``.

    Args:
        n_power_iterations: steps per call.
        eps: a vector shorter than this is not normalised: the estimate stays.

    The others: see :class:`Norm`; ``target_norm`` is where ``g`` starts, too.
    """

    n_power_iterations: int = 1
    eps: float = 1e-12

    _target_modules: ClassVar[Targets] = common_targets()
    suffixes: ClassVar[tuple[str, ...]] = ("orig", "g", "u", "v")
    raw: ClassVar[str] = "orig"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_power_iterations != int(self.n_power_iterations) or self.n_power_iterations < 1:
            raise ValueError(
                f"n_power_iterations must be a whole number >= 1, got {self.n_power_iterations}"
            )

    def split(self, weight: Tensor, dim: int) -> Parts:
        matrix = _matrix(weight, dim)
        with _full_precision(matrix):
            u, v = (x.to(weight.dtype) for x in leading_singular_vectors(matrix))
        if not self.learn_scale:
            return {"orig": weight, "u": u, "v": v}
        rows = [size if d == dim % weight.dim() else 1 for d, size in enumerate(weight.shape)]
        g = _stretch(matrix, u, v).expand(rows).clone()
        return {"orig": weight, "g": g, "u": u, "v": v}

    def start(self, parts: Parts) -> Parts:
        if self.learn_scale:
            parts["g"].fill_(self.target_norm)
        return parts

    def weight(self, parts: Parts, dim: int) -> Tensor:
        # Copies: the next call, or DDP, writes into the buffers before this one's backward. A copy
        # of a model that was moved may still hold buffers of its former dtype.
        u, v = (parts[suffix].to(parts["orig"], copy=True) for suffix in ("u", "v"))
        sigma = _stretch(_matrix(parts["orig"], dim), u, v)
        return self._scale(parts["orig"], sigma, parts.get("g"))

    @torch.no_grad()
    def advance(self, parts: Parts, dim: int) -> None:
        matrix, u, v = _matrix(parts["orig"], dim), parts["u"], parts["v"]
        with _full_precision(matrix):
            for _ in range(self.n_power_iterations):
                v.copy_(self._unit(matrix.mT @ u, v))
                u.copy_(self._unit(matrix @ v, u))

    def _unit(self, x: Tensor, otherwise: Tensor) -> Tensor:
        """``x`` normalised; a zero would end the iteration for good."""
        length = torch.linalg.vector_norm(x)
        return torch.where(length > self.eps, x / length, otherwise)


def _matrix(weight: Tensor, dim: int) -> Tensor:
    """The weight with its rows first, as a matrix."""
    if weight.dim() == 2 and dim == 0:
        return weight
    return weight.movedim(dim, 0).reshape(weight.shape[dim], -1)


def _full_precision(matrix: Tensor) -> AbstractContextManager[Any]:
    """Without autocast, which does not know the meta device."""
    return nullcontext() if matrix.is_meta else AutocastState(matrix.device).suspended()


def _stretch(matrix: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """``u^T matrix v``."""
    with _full_precision(matrix):
        return u @ (matrix @ v)


@torch.no_grad()
def leading_singular_vectors(matrix: Tensor, steps: int = 64) -> tuple[Tensor, Tensor]:
    """The singular vectors ``u``, ``v`` of the largest singular value: ``u^T matrix v`` is it.

    The best of a Krylov space of ``matrix^T matrix``: exact for up to 64 rows or columns, and close
    where power iteration would need thousands of steps. The start is fixed, so torch's generator is
    not touched.
    """
    if matrix.is_meta or not matrix.numel():
        return matrix.new_zeros(matrix.shape[0]), matrix.new_zeros(matrix.shape[1])
    # Weights that wait for a checkpoint may hold anything; singular vectors of zero are as good.
    m = torch.nan_to_num(matrix.to(torch.promote_types(matrix.dtype, torch.float32)), 0.0, 0.0, 0.0)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(m.shape[1], generator=generator, dtype=torch.float64).to(m)
    basis = m.new_zeros(0, m.shape[1])
    for _ in range(min(steps, *m.shape) + 1):
        length = torch.linalg.vector_norm(x)
        for _ in range(2):  # once leaves a trace of the basis behind
            x = x - (basis @ x) @ basis
        rest = torch.linalg.vector_norm(x)
        if not rest > 10 * torch.finfo(m.dtype).eps * length:
            break  # nothing left but rounding: the space is complete
        basis = torch.cat([basis, (x / rest).unsqueeze(0)])
        x = m.mT @ (m @ basis[-1])
    U, _, Vh = torch.linalg.svd(m @ basis.mT, full_matrices=False)
    return U[:, 0].contiguous(), Vh[0] @ basis
