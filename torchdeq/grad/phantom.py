"""Phantom gradient: a few damped steps with a graph, after a solve without one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchdeq.checks import require_damping, require_whole
from torchdeq.grad.base import BACKWARDS, Backward
from torchdeq.packed import PackedFn


@BACKWARDS.register("phantom")
@dataclass(frozen=True, kw_only=True)
class Phantom(Backward):
    r"""Unrolled phantom gradient (Geng et al., 2021).

    $$z^{k+1} = (1 - \tau) z^k + \tau f(z^k), \qquad k = 0, \dots, \text{grad} - 1$$

    from the solved state, with every step in the graph. One undamped step is the Jacobian-free
    gradient; a forward budget of 0 leaves only these steps, which is backpropagation through time.

    Args:
        grad: number of steps.
        tau: damping in (0, 1].
        sup_gap: if positive, return the state after every `sup_gap`-th step.
        sup_loc: otherwise, return the states after these steps, and the last one.
    """

    grad: int = 1
    tau: float = 1.0
    sup_gap: int = -1
    sup_loc: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "sup_loc", tuple(self.sup_loc or ()))
        require_whole("grad, the steps with a graph,", self.grad)
        require_damping(self.tau)
        if self.sup_gap > self.grad:
            raise ValueError(
                f"sup_gap {self.sup_gap} leaves no state of {self.grad} steps: make it smaller"
            )
        beyond = [k for k in self.sup_loc if not 0 < k <= self.grad]
        if beyond:
            raise ValueError(f"sup_loc must lie within 1 to grad={self.grad}, got {beyond}")

    def attach(self, f: PackedFn, z: Tensor) -> list[list[Tensor]]:
        tensors, states = f.packing.split(z), []
        for k in range(1, self.grad + 1):
            images = f.on_tensors(tensors)
            if self.tau != 1:
                images = [torch.lerp(a, b, self.tau) for a, b in zip(tensors, images, strict=True)]
            tensors = images
            if k % self.sup_gap == 0 if self.sup_gap > 0 else k in self.sup_loc:
                states.append(tensors)
        return states if self.sup_gap > 0 else [*states, tensors]
