"""`deq_decorator` of torchdeq 0.1.0: a map and its start for a solver function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchdeq.packed import PackedFn
from torchdeq.packing import Packing
from torchdeq.pytree import State


class DEQFunction:
    """A map of one tensor: of a tensor state itself, of a tuple or list state packed as (B, D).

    Called as `f(z, tau=1.0)` it returns `(1 - tau) z + tau func(z)`.
    """

    def __init__(self, func: Callable[..., State], z_init: State) -> None:
        self.packing = Packing(z_init)
        self.func = PackedFn(self.packing, func)
        self._single = isinstance(z_init, Tensor)

    def list2vec(self, z: State) -> Tensor:
        """Return a state as the tensor that solvers see."""
        return z if self._single else self.packing.pack(z)

    def vec2list(self, z: Tensor) -> Any:
        """Return the tensor that solvers see as a tensor, or as a list of tensors."""
        return z if self._single else self.packing.split(z)

    def detach(self, z: Tensor) -> Tensor:
        return z.detach()

    def __call__(self, z: Tensor, tau: float = 1.0) -> Tensor:
        fz = self.func.on_tensors([z])[0] if self._single else self.func(z)
        return fz if tau == 1 else torch.lerp(z, fz, tau)


def deq_decorator(
    func: Callable[..., State], z_init: State, no_stat: bool = True
) -> tuple[DEQFunction, Tensor]:
    """Return `func` and its start for a solver function; `no_stat` has no effect any more."""
    wrapped = DEQFunction(func, z_init)
    return wrapped, wrapped.list2vec(z_init)
