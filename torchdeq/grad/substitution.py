"""Calls of `f` with substitutes for the tensors that it depends on."""

from __future__ import annotations

from copy import copy
from threading import local
from types import CellType, FunctionType
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchdeq import _torch
from torchdeq._torch import tree_leaves, tree_map
from torchdeq.grad.watching import Inputs, belongs_to_transform, has_differentiable_dtype
from torchdeq.packed import PackedFn


def substituted(f: PackedFn, substitutes: Inputs) -> PackedFn:
    """Return `f` with substitutes among its arguments and in the cells of its closure.

    `Substitution` sees the operands of operations alone. A tensor that `f` passes to a function
    transform, to a custom `autograd.Function` or to a control-flow operator must be replaced
    before the call.
    """

    def swap(t: Any) -> Any:
        return substitutes.get(id(t), t)

    copied = copy(f)
    copied.args = tree_map(swap, f.args)
    cells = getattr(f.f, "__closure__", None)
    if isinstance(f.f, FunctionType) and cells and any(_tensor_id(c) in substitutes for c in cells):
        closure = tuple(CellType(swap(c.cell_contents)) if _tensor_id(c) else c for c in cells)
        copied.f = FunctionType(
            f.f.__code__, f.f.__globals__, f.f.__name__, f.f.__defaults__, closure
        )
        copied.f.__kwdefaults__ = f.f.__kwdefaults__
    return copied


def _tensor_id(cell: CellType) -> int | None:
    """Return the id of the tensor in a cell of a closure; None for anything else."""
    try:
        return id(cell.cell_contents) if isinstance(cell.cell_contents, Tensor) else None
    except ValueError:  # the variable is not assigned
        return None


def raise_for_hidden_inputs(fz: Tensor, allowed: tuple[Tensor, ...]) -> None:
    """Raise `HiddenInput` if the graph of `fz` reaches a leaf that is not one of the allowed.

    Args:
        fz: the result of a replayed call of `f`.
        allowed: the arguments of the call, and leaves that `f` has created.
    """
    if not fz.requires_grad or _torch.is_wrapped(fz):
        return
    leaves = {id(t) for t in allowed if t.is_leaf}
    visited = {t.grad_fn for t in allowed if t.grad_fn is not None}
    with torch.enable_grad():  # a saved leaf may come back as another object with the same node
        views = [t.view_as(t).grad_fn for t in allowed if t.is_leaf and t.requires_grad]
    nodes = [node.next_functions[0][0] for node in views if node is not None]
    visited |= {node for node in nodes if node is not None}
    pending = [fz.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in leaves:
            raise HiddenInput(leaf)
        pending += [parent for parent, _ in node.next_functions]


class HiddenInput(RuntimeError):
    """The error for an input that `f` uses where no mode sees it."""

    def __init__(self, t: Tensor) -> None:
        super().__init__(
            f"f uses a tensor of shape {tuple(t.shape)} where it cannot be seen (in a custom "
            "autograd.Function, a transform or a control-flow operator), so its gradient would be "
            "lost: pass it to f through args, or pass t.view_as(t) to that operation"
        )


_replays = local()  # .active: the substitutions of this thread, outermost first


def resolved(t: Tensor) -> Tensor:
    """Return the tensor that the active substitutions put in the place of `t`, or `t` itself."""
    for substitutes in reversed(getattr(_replays, "active", [])):
        t = substitutes.get(id(t), t)
    return t


class Substitution(TorchFunctionMode):
    """A mode that replaces the inputs of a captured call by substitutes.

    Args:
        substitutes: the new tensors, by the ids of those that they replace.
    """

    def __init__(self, substitutes: Inputs) -> None:
        super().__init__()
        self._substitutes = substitutes
        self._original_ids = {id(new): old for old, new in substitutes.items()}
        self.used: set[int] = set()  # ids of the inputs that the call has used
        self.hidden: Tensor | None = None  # an input that a transform inside f has wrapped
        self.leaves: list[Tensor] = []  # leaves that f has created for its own differentiation
        self._outside_transforms = not _torch.function_transforms_active()

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        _replays.active = [*getattr(_replays, "active", []), self._substitutes]
        return self

    def __exit__(self, *error: object) -> None:
        _replays.active = _replays.active[:-1]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*self._swapped(args), **(self._swapped(kwargs) if kwargs else {}))
        if isinstance(out, Tensor) and out.is_leaf and out.requires_grad:
            self.leaves.append(out)
        elif out is None and args and isinstance(args[0], Tensor):  # `t.requires_grad = True`
            self.leaves.append(args[0])
        return out

    def _swapped(self, operands: Any) -> Any:
        return tree_map(self._swap, operands)

    def _swap(self, t: Any) -> Any:
        new = self._substitutes.get(id(t))
        if new is None:
            self._record_use(t)
            return t
        self.used.add(id(t))
        return new

    def _record_use(self, t: Any) -> None:
        """Record the use of a substitute, even if a transform inside `f` has wrapped it."""
        while isinstance(t, Tensor):
            if id(t) in self._original_ids:
                self.used.add(self._original_ids[id(t)])
                return
            if not _torch.is_wrapped(t):
                return
            t = _torch.unwrapped(t)
            is_original = id(t) in self._substitutes and id(t) not in self._original_ids
            if self._outside_transforms and is_original:
                self.hidden = t
                return


class InputSearch(Substitution):
    """A substitution that also collects inputs without a substitute: tensors of a transform."""

    def __init__(self, substitutes: Inputs, z: Tensor) -> None:
        super().__init__(substitutes)
        self.new_inputs: Inputs = {}
        self._computed = {id(t): t for t in (z, *substitutes.values())}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = super().__torch_function__(func, types, args, kwargs)
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self._computed[id(t)] = t
        return out

    def _swap(self, t: Any) -> Any:
        new = super()._swap(t)
        if new is t and isinstance(t, Tensor) and self._is_input(t):
            self.new_inputs[id(t)] = t
        return new

    def _is_input(self, t: Tensor) -> bool:
        """Return whether `t` belongs to a transform and `f` has not visibly computed it."""
        if not has_differentiable_dtype(t):
            return False
        if id(t) in self._computed or not belongs_to_transform(t):
            return False
        inner = t
        while _torch.is_wrapped(inner):  # a transform inside f wraps what f has computed
            inner = _torch.unwrapped(inner)
            if id(inner) in self._computed:
                self._computed[id(t)] = t
                return False
        return True
