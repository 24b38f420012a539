"""Code that runs as plain Python around compiled code, and solves that become part of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from threading import Lock
from typing import Any, ParamSpec, TypeVar

import torch

from torchdeq._torch import compiler_loaded, without_compiler

P = ParamSpec("P")
R = TypeVar("R")

_graph_solver: ContextVar[Callable[..., Any] | None] = ContextVar("graph_solver", default=None)


def untraced(fn: Callable[P, R], prepare: Callable[[R], R] | None = None) -> Callable[P, R]:
    """Return `fn` such that `torch.compile` breaks its graph there and does not trace `fn`.

    For loops whose control flow depends on values. Functions that `fn` calls may be compiled.

    Args:
        fn: the function.
        prepare: applied to what `fn` returns to compiled code, by default nothing.
    """

    def prepared(*args: P.args, **kwargs: P.kwargs) -> R:
        result = fn(*args, **kwargs)
        return result if prepare is None else prepare(result)

    hidden = without_compiler(prepared)

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return (hidden if torch.compiler.is_dynamo_compiling() else fn)(*args, **kwargs)

    return call


def graph_solver() -> Callable[..., Any] | None:
    """Return the function that solves in the place of `solve` and `fixed_point`, during an export.

    None outside of an export.
    """
    return _graph_solver.get()


@contextmanager
def solving_by(solver: Callable[..., Any]) -> Iterator[None]:
    """Run a block in which `solver` takes the place of `solve` and `fixed_point`."""
    token = _graph_solver.set(solver)
    try:
        yield
    finally:
        _graph_solver.reset(token)


class _EagerBlocks:
    """The blocks of all threads in which compiled functions run eagerly.

    torch has one stance for the whole process, so the first block sets it and the last one puts the
    old one back. If every block did both, two threads could leave the process eager for good.
    """

    def __init__(self) -> None:
        self._lock, self._open = Lock(), 0
        self._stance: AbstractContextManager[Any] = nullcontext()

    @contextmanager
    def block(self) -> Iterator[None]:
        with self._lock:
            if not self._open:
                self._stance = torch.compiler.set_stance("force_eager")
                self._stance.__enter__()
            self._open += 1
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1
                if not self._open:
                    self._stance.__exit__(None, None, None)


_eager_blocks = _EagerBlocks()


def force_eager() -> AbstractContextManager[None]:
    """Return a block in which compiled functions run eagerly, as plain Python.

    Those of other threads run eagerly as well while the block lasts.
    """
    return _eager_blocks.block() if compiler_loaded() else nullcontext()
