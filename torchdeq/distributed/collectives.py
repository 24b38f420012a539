"""Announced collectives: how a solve learns that its `f` communicates with other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, Protocol, TypeVar, overload

from torch import nn
from torch.distributed import ProcessGroup

from torchdeq.tracing import untraced

F = TypeVar("F", bound=Callable[..., Any])
Group = ProcessGroup | Callable[..., ProcessGroup | None] | None


class Listener(Protocol):
    """An object that learns of every collective that is announced while it listens."""

    def notice(self, group: ProcessGroup | None) -> None:
        """Learn of a collective of this group; None is the group of all processes."""


#: The solves that are running in this thread, the outermost first.
_LISTENERS: ContextVar[tuple[Listener, ...]] = ContextVar("listeners", default=())


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Return a block during which a listener learns of announced collectives."""
    token = _LISTENERS.set((*_LISTENERS.get(), listener))
    try:
        yield
    finally:
        _LISTENERS.reset(token)


@untraced
def announce(group: ProcessGroup | None) -> None:
    """Tell every solve that is running in this thread that `f` calls a collective."""
    for listener in _LISTENERS.get():
        listener.notice(group)


@overload
def collective(fn: F, *, group: Group = None) -> F: ...


@overload
def collective(fn: None = None, *, group: Group = None) -> Callable[[F], F]: ...


def collective(fn: F | None = None, *, group: Group = None) -> F | Callable[[F], F]:
    """Announce that a function, or a class of modules, communicates with other processes.

    All processes must call a collective equally often. So a solve whose `f` calls an announced
    function or module agrees with the other processes of the group when to stop, in the forward and
    in the backward pass, as with `sync_stop=group`.

    Args:
        fn: the function, or a subclass of `nn.Module`, whose `forward` is then announced.
        group: the process group of the collective, or a function of the arguments of the call that
            returns the group; None is the group of all processes.

    Example:
        >>> @collective
        ... def mean_over_processes(x):
        ...     return SumOverProcesses.apply(x) / dist.get_world_size()
    """
    if fn is None:
        return partial(collective, group=group)
    if isinstance(fn, type):
        if not issubclass(fn, nn.Module):
            raise TypeError(
                f"collective takes a function or a class of modules, got the class {fn.__name__}"
            )
        fn.forward = collective(fn.forward, group=group)
        return fn
    if not callable(fn) or isinstance(fn, nn.Module):
        raise TypeError(
            f"collective takes a function or a class of modules, got {type(fn).__name__}: for one "
            "module, wrap the function that calls it"
        )

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if group is None or isinstance(group, ProcessGroup):
            announce(group)
        else:
            announce(group(*args, **kwargs))
        return fn(*args, **kwargs)

    return call
