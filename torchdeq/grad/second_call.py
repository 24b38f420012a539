"""A second call of a compiled `f`, in the backward pass: products without gradients of parameters.

The backward graph of a compiled `f` computes the gradients of all its inputs at every product. In
the second call the parameters require no gradient, so a product computes that of the state alone.

Meanwhile the program may have changed what `f` uses: a loop binds the variables of a closure anew,
the next forward pass stores another input or overwrites the memory of the last one. The call uses
the modules, arguments and closure variables of the forward pass. And its value must be that of the
forward pass: if it is not, the products use the graph of the forward pass, which is slower and
always right.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchdeq._torch import tree_map
from torchdeq.modules import ModuleState
from torchdeq.packed import PackedFn
from torchdeq.randomness import Randomness

_ROUNDINGS = 8  # rounding errors by which two compiled graphs of one function may differ


class SecondCall:
    """A call of a compiled `f` that can be repeated in the backward pass.

    Args:
        f: the packed map.
        before: the random generators before the first call.
    """

    def __init__(self, f: PackedFn, before: Randomness) -> None:
        self._modules, self._randomness = ModuleState(f.f), before
        self._f = f.with_own_closure()
        self._f.args = tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, f.args)

    def __call__(self, h: Tensor) -> Tensor:
        """Return `f(h)` with a graph that has no parameters."""
        modules = self._modules.restored(statistics="copied", detached=True)
        with torch.enable_grad(), modules, self._randomness.replayed():
            return self._f(h)

    def repeated(self, fz: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Return an image and a state whose graph serves the products.

        Args:
            fz: the image of the first call, with its graph.
            h: the state of the first call.

        Returns:
            The image and the state of a second call; if their values differ, those of the first.
        """
        again = h.detach().requires_grad_()
        image = self(again)
        # Products through different graphs may contain different collectives.
        if self._f.peers.any(_differ(image.detach(), fz.detach(), self._f.eps)):
            return fz, h
        return image, again


def _differ(a: Tensor, b: Tensor, eps: float) -> bool:
    """Return whether rows differ by more than rounding, or are NaN; this reads from the device."""
    if a.shape != b.shape:
        return True
    if not a.numel():
        return False
    allowed = _ROUNDINGS * eps * b.abs().amax(1)
    return not bool(((a - b).abs().amax(1) <= allowed).all())
