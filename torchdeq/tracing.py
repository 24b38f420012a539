"""Beside ``torch.compile``: what must run as plain Python, inside and around compiled code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from torchdeq._torch import compiler_loaded, without_compiler

__all__ = ["compiler_loaded", "eagerly", "untraced"]

P = ParamSpec("P")
R = TypeVar("R")


def untraced(fn: Callable[P, R]) -> Callable[P, R]:
    """``fn``, at which ``torch.compile`` breaks its graph once instead of looking inside.

    For loops that decide by values. What ``fn`` calls may itself be compiled.
    """
    hidden = without_compiler(fn)

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return (hidden if torch.compiler.is_compiling() else fn)(*args, **kwargs)

    return call


def eagerly() -> AbstractContextManager[Any]:
    """A block in which compiled functions run as they were written, call by call."""
    if not compiler_loaded():
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance
