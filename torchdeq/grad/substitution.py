"""`f` with other tensors in the place of those that it depends on."""

from __future__ import annotations

from copy import copy
from threading import local
from types import CellType, FunctionType
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from torchdeq import _torch
from torchdeq.grad.watching import Inputs, belongs_to_transform, has_derivatives
from torchdeq.packed import PackedFn


def substituted(f: PackedFn, substitutes: Inputs) -> PackedFn:
    """Return `f` with substitutes among its arguments and in the cells of its closure.

    The mode below sees the operands of operations alone. A tensor that `f` hands to a function
    transform, to a custom `autograd.Function` or to a control-flow operator has to be in place
    before.
    """

    def swap(t: Any) -> Any:
        return substitutes.get(id(t), t)

    copied = copy(f)
    copied.args = tree_map(swap, f.args)
    cells = getattr(f.f, "__closure__", None)
    if isinstance(f.f, FunctionType) and cells and any(_content(c) in substitutes for c in cells):
        closure = tuple(CellType(swap(c.cell_contents)) if _content(c) else c for c in cells)
        copied.f = FunctionType(
            f.f.__code__, f.f.__globals__, f.f.__name__, f.f.__defaults__, closure
        )
        copied.f.__kwdefaults__ = f.f.__kwdefaults__
    return copied


def _content(cell: CellType) -> int | None:
    """Return the identity of a tensor in a cell; None for anything else."""
    try:
        return id(cell.cell_contents) if isinstance(cell.cell_contents, Tensor) else None
    except ValueError:  # the variable is not assigned
        return None


def raise_for_hidden_inputs(fz: Tensor, given: tuple[Tensor, ...]) -> None:
    """Raise if the graph of a replayed call reaches a leaf other than those that were given."""
    if not fz.requires_grad or _torch.is_wrapped(fz):
        return
    leaves = {id(t) for t in given if t.is_leaf}
    seen = {t.grad_fn for t in given if t.grad_fn is not None}
    with torch.enable_grad():  # a saved leaf may come back as another object with the same node
        same = [t.view_as(t).grad_fn for t in given if t.is_leaf and t.requires_grad]
    nodes = [node.next_functions[0][0] for node in same if node is not None]
    seen |= {node for node in nodes if node is not None}
    ahead = [fz.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in leaves:
            raise HiddenInput(leaf)
        ahead += [parent for parent, _ in node.next_functions]


class HiddenInput(RuntimeError):
    """An error about an input of `f` that it uses where no mode sees it."""

    def __init__(self, t: Tensor) -> None:
        super().__init__(
            f"f uses a tensor of shape {tuple(t.shape)} where it cannot be seen (in a custom "
            "autograd.Function, a transform or a control-flow operator), so its gradient would be "
            "lost: pass it to f through args, or hand over t.view_as(t) there"
        )


_replays = local()  # .active: the substitutions at work in this thread, outermost first


def resolved(t: Tensor) -> Tensor:
    for substitutes in reversed(getattr(_replays, "active", [])):
        t = substitutes.get(id(t), t)
    return t


class Substitution(TorchFunctionMode):
    """A mode that puts other tensors in the place of the inputs of the captured call."""

    def __init__(self, substitutes: Inputs) -> None:
        super().__init__()
        self._substitutes = substitutes
        self._places = {id(new): old for old, new in substitutes.items()}
        self.used: set[int] = set()
        self.hidden: Tensor | None = None  # an original that a transform inside f has wrapped
        self.leaves: list[Tensor] = []  # that f has made to differentiate on its own
        self._plain = not _torch.function_transforms_active()

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
            self._record(t)
            return t
        self.used.add(id(t))
        return new

    def _record(self, t: Any) -> None:
        """Record which substitute is used, even if a transform inside `f` has wrapped it."""
        while isinstance(t, Tensor):
            if id(t) in self._places:
                self.used.add(self._places[id(t)])
                return
            if not _torch.is_wrapped(t):
                return
            t = _torch.unwrapped(t)
            if self._plain and id(t) in self._substitutes and id(t) not in self._places:
                self.hidden = t
                return


class InputSearch(Substitution):
    """A substitution that also collects tensors of a transform that are not among the inputs."""

    def __init__(self, substitutes: Inputs, z: Tensor) -> None:
        super().__init__(substitutes)
        self.unknown: Inputs = {}
        self._made = {id(t): t for t in (z, *substitutes.values())}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = super().__torch_function__(func, types, args, kwargs)
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self._made[id(t)] = t
        return out

    def _swap(self, t: Any) -> Any:
        new = super()._swap(t)
        if new is t and isinstance(t, Tensor) and has_derivatives(t) and self._is_input(t):
            self.unknown[id(t)] = t
        return new

    def _is_input(self, t: Tensor) -> bool:
        """Return whether a tensor of a transform came from outside `f`, as far as is visible."""
        if id(t) in self._made or not belongs_to_transform(t):
            return False
        inner = t
        while _torch.is_wrapped(inner):  # f's own transform wraps what f has made
            inner = _torch.unwrapped(inner)
            if id(inner) in self._made:
                self._made[id(t)] = t
                return False
        return True
