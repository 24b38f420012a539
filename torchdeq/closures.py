"""Closures for later calls: a call in the backward pass sees the variables of the forward pass.

A program may bind a variable anew after a solve, as the next round of a loop does with its input.
"""

from __future__ import annotations

import dis
from functools import lru_cache
from types import CellType, CodeType, FunctionType
from typing import Any

from torchdeq._torch import is_compiled

_DEPTH = 3  # functions inside functions whose closures are kept


def with_own_closure(f: Any, depth: int = _DEPTH) -> Any:
    """Return a function whose closure variables keep the values that they have now.

    Functions among these values are treated alike. Variables that `f` itself assigns stay shared
    with the program. Anything but a plain function comes back as it is, and so does a compiled one:
    its graphs belong to its identity.
    """
    if not depth or not isinstance(f, FunctionType) or not f.__closure__ or is_compiled(f):
        return f
    assigned = _assigned(f.__code__)
    cells = tuple(
        cell if name in assigned else _own_cell(cell, depth - 1)
        for name, cell in zip(f.__code__.co_freevars, f.__closure__, strict=True)
    )
    return with_cells(f, cells)


def with_cells(f: FunctionType, cells: tuple[CellType, ...]) -> FunctionType:
    """Return a function with the code and attributes of another, and other closure variables."""
    own = FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, cells)
    own.__kwdefaults__, own.__module__ = f.__kwdefaults__, f.__module__
    vars(own).update(vars(f))
    return own


def _own_cell(cell: CellType, depth: int) -> CellType:
    try:
        return CellType(with_own_closure(cell.cell_contents, depth))
    except ValueError:  # the variable was deleted or is not assigned yet
        return cell


@lru_cache(maxsize=1024)
def _assigned(code: CodeType) -> frozenset[str]:
    """Return the variables of enclosing functions that a code object, or one inside it, assigns."""
    stores = (i for i in dis.get_instructions(code) if i.opname in ("STORE_DEREF", "DELETE_DEREF"))
    names = {instruction.argval for instruction in stores}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names |= _assigned(inner)
    return frozenset(names)
