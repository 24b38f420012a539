"""Inputs of `f` that share memory, like parts of a chunk: a loop may not take two of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

from torch import Tensor

from torchdeq._torch import memory_id, tree_leaves, tree_map
from torchdeq.closures import with_cells
from torchdeq.reach import reachable_modules

_MAX_DEPTH = 3  # functions in closures of functions


def separated(f: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return `f` and its arguments with copies in the place of tensors that share memory.

    Tensors in `args` and in closures are copied, in containers too. The parameters of modules stay:
    only what shares memory with them is copied.
    """
    inputs = {id(t): t for t in (*_tensors(args), *_closed_over(f, 0))}
    modules = reachable_modules(f).values()
    weights = {id(t): t for m in modules for t in (*m.parameters(), *m.buffers())}
    owners = Counter(memory_id(t) for t in (inputs | weights).values())
    copies: dict[int, Tensor] = {
        key: t.clone()
        for key, t in inputs.items()
        if key not in weights and owners[memory_id(t)] > 1
    }
    if not copies:
        return f, args

    def swap(t: Any) -> Any:
        return copies.get(id(t), t)

    return _with_closure(f, swap, 0), tree_map(swap, args)


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


def _closed_over(f: Any, depth: int) -> list[Tensor]:
    """Return the tensors in the closure of a function, and of functions in it."""
    tensors: list[Tensor] = []
    for content in _contents(f):
        if isinstance(content, FunctionType) and depth < _MAX_DEPTH:
            tensors += _closed_over(content, depth + 1)
        else:
            tensors += _tensors(content)
    return tensors


def _contents(f: Any) -> list[Any]:
    """Return what the closure of a function holds, without variables that are not assigned."""
    cells = (f.__closure__ or ()) if isinstance(f, FunctionType) else ()
    contents = []
    for cell in cells:
        try:
            contents.append(cell.cell_contents)
        except ValueError:
            continue
    return contents


def _with_closure(f: Any, swap: Callable[[Any], Any], depth: int) -> Any:
    """Return a function with other tensors in its closure, and in those of functions in it."""
    if not isinstance(f, FunctionType) or not f.__closure__:
        return f

    def renewed(cell: CellType) -> CellType:
        try:
            content = cell.cell_contents
        except ValueError:
            return cell
        if isinstance(content, FunctionType):
            new = _with_closure(content, swap, depth + 1) if depth < _MAX_DEPTH else content
        else:
            new = tree_map(swap, content) if _tensors(content) else content
        return CellType(new)

    return with_cells(f, tuple(renewed(cell) for cell in f.__closure__))
