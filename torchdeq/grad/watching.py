"""The tensors that `f` depends on, found by watching the operands of its operations."""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from torchdeq import _torch

Inputs = dict[int, Tensor]  # tensors by identity, kept alive so that no identity is given twice


def differentiable(t: Tensor) -> bool:
    return has_derivatives(t) and (t.requires_grad or belongs_to_transform(t))


def has_derivatives(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def belongs_to_transform(t: Tensor) -> bool:
    """Return whether a tensor belongs to a function transform or has a tangent."""
    if _torch.is_wrapped(t) or not _torch.dual_level_active():
        return _torch.is_wrapped(t)
    if _torch.function_transforms_active():
        return True  # where f transforms on its own, tangents of the level outside are hidden
    with _torch.forward_mode(True):
        return forward_ad.unpack_dual(t).tangent is not None


class Watch(TorchFunctionMode):
    """Collects the differentiable tensors that a call uses and did not make."""

    def __init__(self, z: Tensor) -> None:
        super().__init__()
        self.inputs: Inputs = {}
        self.nested = False  # whether f differentiates, or transforms, on its own
        self._made = {id(z): z}
        self._level = _torch.current_level()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.nested |= torch.is_grad_enabled() or _torch.current_level() > self._level
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, Tensor) and id(t) not in self._made:
                self._look_at(t)
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and id(t) not in self.inputs:
                self._made[id(t)] = t
        return out

    def _look_at(self, t: Tensor) -> None:
        if differentiable(t):
            self.inputs.setdefault(id(t), t)
        if self.nested:  # a tensor that f hands to a transform of its own comes wrapped
            while _torch.level_of(t) > self._level:
                t = _torch.unwrapped(t)
                if id(t) not in self._made and differentiable(t):
                    self.inputs.setdefault(id(t), t)

    def in_both(self, other: Watch) -> Inputs:
        """Return the inputs of both calls; tensors that `f` makes itself differ in every call."""
        return {key: t for key, t in self.inputs.items() if key in other.inputs}
