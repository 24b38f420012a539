"""The search for the tensors that `f` depends on, by watching the operands of its operations."""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchdeq import _torch
from torchdeq._torch import tree_leaves

Inputs = dict[int, Tensor]  # by `id`; the tensors stay alive, so that no two share an id


def is_differentiable(t: Tensor) -> bool:
    """Return whether derivatives by `t` are asked for, by plain autograd or by a transform."""
    return has_differentiable_dtype(t) and (t.requires_grad or belongs_to_transform(t))


def has_differentiable_dtype(t: Tensor) -> bool:
    """Return whether the entries of `t` are real or complex numbers."""
    return t.is_floating_point() or t.is_complex()


def belongs_to_transform(t: Tensor) -> bool:
    """Return whether a tensor belongs to a function transform or has a tangent."""
    if _torch.is_wrapped(t) or not _torch.dual_level_active():
        return _torch.is_wrapped(t)
    if _torch.function_transforms_active():
        return True  # a transform inside f hides the tangents of the level outside
    with _torch.forward_mode(True):
        return forward_ad.unpack_dual(t).tangent is not None


class Watch(TorchFunctionMode):
    """A mode that collects the differentiable tensors a call uses and has not computed itself."""

    def __init__(self, z: Tensor) -> None:
        super().__init__()
        self.inputs: Inputs = {}
        self.nested = False  # whether f itself differentiates or transforms
        self._computed = {id(z): z}
        self._level = _torch.current_level()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.nested |= torch.is_grad_enabled() or _torch.current_level() > self._level
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, Tensor) and id(t) not in self._computed:
                self._collect(t)
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and id(t) not in self.inputs:
                self._computed[id(t)] = t
        return out

    def _collect(self, t: Tensor) -> None:
        if is_differentiable(t):
            self.inputs.setdefault(id(t), t)
        if self.nested:  # a transform inside f wraps the tensors that f passes to it
            while _torch.level_of(t) > self._level:
                t = _torch.unwrapped(t)
                if id(t) not in self._computed and is_differentiable(t):
                    self.inputs.setdefault(id(t), t)

    def common_inputs(self, other: Watch) -> Inputs:
        """Return the inputs of both calls: tensors that `f` computes differ between calls."""
        return {key: t for key, t in self.inputs.items() if key in other.inputs}
