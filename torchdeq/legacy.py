"""What cores written for torchdeq 0.1.0 use beside the public interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchdeq.packing import Packing, State


class DEQFunction:
    """``func`` on one tensor: a tensor state as it is, a tuple or list of tensors packed (B, D).

    Called as ``f(z, tau=1.0)`` it returns ``(1 - tau) z + tau func(z)``.
    """

    def __init__(self, func: Callable[..., State], z_init: State) -> None:
        self.packing = Packing(z_init)
        self.func = self.packing.wrap(func)
        self._single = isinstance(z_init, Tensor)

    def list2vec(self, z: State) -> Tensor:
        """A state as the tensor that solvers see."""
        return z if self._single else self.packing.pack(z)

    def vec2list(self, z: Tensor) -> Any:
        """That tensor as a tensor, or a list of tensors."""
        return z if self._single else self.packing.split(z)

    def detach(self, z: Tensor) -> Tensor:
        return z.detach()

    def __call__(self, z: Tensor, tau: float = 1.0) -> Tensor:
        fz = self.func.on_tensors([z])[0] if self._single else self.func(z)
        return fz if tau == 1 else torch.lerp(z, fz, tau)


def deq_decorator(
    func: Callable[..., State], z_init: State, no_stat: bool = True
) -> tuple[DEQFunction, Tensor]:
    """``func`` and its start for a solver function; ``no_stat`` no longer makes a difference."""
    wrapped = DEQFunction(func, z_init)
    return wrapped, wrapped.list2vec(z_init)
