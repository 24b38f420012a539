"""A closure as a function of explicit inputs.

Exact higher derivatives need everything that ``f`` depends on as inputs of an autograd Function.
The tensors are found by watching one call; later calls see substitutes in their place. Both work
operation by operation, so a compiled ``f`` runs uncompiled here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._C import _functorch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from torchdeq.modules import ModuleState
from torchdeq.packing import PackedFn
from torchdeq.randomness import Randomness
from torchdeq.tracing import eagerly


def transforms_active() -> bool:
    """Whether a ``torch.func`` transform or a level of forward-mode differentiation is at work."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


class ExplicitFn:
    """``F(z, *c)``: the packed map with the tensors it closes over as arguments."""

    def __init__(self, f: PackedFn) -> None:
        self.f = f
        self.inputs: list[Tensor] = []
        self._modules = ModuleState(f.f)
        self._randomness: Randomness | None = None
        self._again = False

    def watch(self, z: Tensor) -> Tensor:
        """``f(z)``, a call that shows what ``f`` uses: the ``inputs`` from now on."""
        watch = _Watch(z)
        with torch.no_grad(), forward_ad._set_fwd_grad_enabled(False), eagerly(), watch:
            fz = self.f(z)
        self.inputs = list(watch.found.values())
        return fz

    def rehearse(self, z: Tensor) -> None:
        """The same by a call that does not count: it leaves running statistics alone.

        Random numbers are spent, though: a mask that a module keeps from this call would otherwise
        be drawn again by the next.
        """
        with self._modules.restored("none"):
            self.watch(z)

    def make(self, *c: Tensor) -> Callable[[Tensor], Tensor]:
        """``z -> F(z, *c)``."""
        substitutes = {id(old): new for old, new in zip(self.inputs, c, strict=True)}

        def call(z: Tensor) -> Tensor:
            modules = self._modules.restored("none") if self._again else nullcontext()
            substitute = _Substitute(substitutes)
            with modules, self._replayed(), eagerly(), substitute:
                fz = self.f(z)
            if self._again and len(substitute.met) < len(substitutes):
                raise RuntimeError(
                    "f does not use the tensors of the forward pass any more when it is called "
                    "again in the backward pass: one that it closes over was replaced; pass it to "
                    "f through args, or use implicit differentiation without higher_order"
                )
            return fz

        return call

    def __call__(self, z: Tensor, *c: Tensor) -> Tensor:
        return self.make(*c)(z)

    def last_call(self, f: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
        """``f(z)``, which every later call only repeats."""
        before = Randomness(z.device)
        fz = f(z)
        self.repeat(before if before.used else None)
        return fz

    def repeat(self, randomness: Randomness | None) -> None:
        """From now on draw these random numbers, and leave modules as they were found."""
        if not self._again:
            self._modules = ModuleState(self.f.f)  # with the masks that the calls so far have drawn
        self._randomness, self._again = randomness, True

    def _replayed(self) -> AbstractContextManager[None]:
        return nullcontext() if self._randomness is None else self._randomness.replayed()


class _Watch(TorchFunctionMode):
    """Collects the differentiable tensors that a call uses and did not make."""

    def __init__(self, z: Tensor) -> None:
        super().__init__()
        self.found: dict[int, Tensor] = {}
        self._made = {id(z): z}  # kept alive, so that no identity is given twice

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, Tensor) and id(t) not in self._made and _differentiable(t):
                self.found.setdefault(id(t), t)
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and id(t) not in self.found:
                self._made[id(t)] = t
        return out


def _differentiable(t: Tensor) -> bool:
    wrapped = _functorch.is_functorch_wrapped_tensor(t) or forward_ad._current_level >= 0
    return t.is_floating_point() and (t.requires_grad or wrapped)


class _Substitute(TorchFunctionMode):
    """Puts other tensors where the watched call had its own."""

    def __init__(self, substitutes: dict[int, Tensor]) -> None:
        super().__init__()
        self._substitutes = substitutes
        self.met: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def swap(t: Any) -> Any:
            if id(t) not in self._substitutes:
                return t
            self.met.add(id(t))
            return self._substitutes[id(t)]

        return func(*tree_map(swap, args), **tree_map(swap, kwargs or {}))
