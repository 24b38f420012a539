"""Compiled maps: `f` runs as graphs of `torch.compile`, which one module keeps for all its calls.

A model often makes a new `f` in each forward pass, a lambda that closes over the input. So what is
compiled is not `f` but a call `(f, *inputs) -> f(*inputs)` that belongs to the DEQ module. Such a
call treats the tensors that `f` closes over as inputs of its graphs; the graphs of one `f` serve
the next one, as long as its code is the same and everything else that it uses is equal.

Each module has a call with a code object of its own, since the compiler keeps graphs, limits and
what it has learnt about sizes by code object: modules of different widths do not disturb each
other. Nothing global is set, and the graphs are freed with the module.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from itertools import count
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from torchdeq._torch import graph_count, keeping_buffers
from torchdeq.notes import note

_BACKEND = "inductor"
#: Graphs of one module at most, if torch allows to choose: with and without gradient, parameters
#: detached for the adjoint, training and evaluation; each for the first batch size, for any other,
#: and for one sample. Beyond the limit `f` runs uncompiled.
_LIMIT = 32
_MANY = 16  # graphs that `f` needs only if it depends on something that changes
_TOO_MANY = (
    f"f has been compiled more than {_MANY} times, because something that it uses changes from "
    "call to call: pass numbers as tensors in args, make modules once, or drop compile_f"
)

_calls: WeakKeyDictionary[nn.Module, Callable[..., Any]] = WeakKeyDictionary()
_numbers = count(1)


def compiled(f: Callable[..., Any], owner: nn.Module) -> Callable[..., Any]:
    """Return `f` such that it runs as compiled graphs, which belong to `owner`.

    Args:
        f: a module, function, method or closure; it may be new in each call of `owner`.
        owner: a DEQ module.
    """
    call = _calls.get(owner)
    if call is None:
        call = _calls[owner] = _new_call()
    elif graph_count(call) > _MANY:
        note(_TOO_MANY)

    def compiled_f(*inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return call(f, *inputs)
        with keeping_buffers():
            return call(f, *inputs)

    # Its graphs keep their buffers, so torch need not refuse to run them again.
    compiled_f.running = keeping_buffers  # type: ignore[attr-defined]
    return compiled_f


def _call(f: Callable[..., Any], *inputs: Any) -> Any:
    return f(*inputs)


def _new_call() -> Callable[..., Any]:
    """Return a compiled `_call` with a code object, and so with graphs, of its own."""
    # The name, too, is new: the compiler remembers by names which sizes have changed.
    code = _call.__code__.replace(co_name=f"call_of_module_{next(_numbers)}")
    choice = {"recompile_limit": _LIMIT}
    options = {k: v for k, v in choice.items() if k in signature(torch.compile).parameters}
    own = FunctionType(code, globals())
    return torch.compile(own, backend=_BACKEND, **options)  # type: ignore[call-overload,no-any-return]
