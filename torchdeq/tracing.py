"""Code that must run as plain Python, inside and around code that `torch.compile` compiles."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from torchdeq._torch import compiler_loaded, without_compiler

P = ParamSpec("P")
R = TypeVar("R")


def untraced(fn: Callable[P, R]) -> Callable[P, R]:
    """Return `fn` such that `torch.compile` breaks its graph there and does not trace `fn`.

    For loops whose control flow depends on values. Functions that `fn` calls may be compiled.
    """
    hidden = without_compiler(fn)

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return (hidden if torch.compiler.is_compiling() else fn)(*args, **kwargs)

    return call


def force_eager() -> AbstractContextManager[Any]:
    """Return a block in which compiled functions run eagerly, as plain Python."""
    if not compiler_loaded():
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance
