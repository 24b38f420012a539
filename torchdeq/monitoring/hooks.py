"""Hooks on a DEQ that see its statistics and change nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import nn

from torchdeq._torch import without_compiler
from torchdeq.stats import SolverStat

Sink = Callable[[SolverStat], None]


def attach(deq: nn.Module, forward: Sink, backward: Sink) -> list[Any]:
    """Register hooks that pass the statistics of training calls on; return handles to remove them.

    Args:
        deq: the module.
        forward: receives the statistics of each forward solve.
        backward: receives those of each adjoint solve.
    """
    names = list(inspect.signature(type(deq).forward).parameters)[1:]
    handles = [deq.register_forward_hook(_After(deq, forward))]
    if "backward_writer" in names:
        before = _Before(deq, backward, names.index("backward_writer"))
        handles.append(deq.register_forward_pre_hook(before, with_kwargs=True))
    return handles


class _Hook:
    """A hook of one module: a copy of the module, or an unpickled one, gets an idle hook."""

    def __init__(self, deq: nn.Module, sink: Sink) -> None:
        self._deq, self._sink = ref(deq), sink

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _make_idle, ()

    def concerns(self, deq: nn.Module) -> bool:
        """Return whether a call is one to record: of this module, in training."""
        return deq is self._deq() and deq.training


class _Before(_Hook):
    """A pre-hook that adds a sink to the backward writer of a call."""

    def __init__(self, deq: nn.Module, sink: Sink, position: int) -> None:
        super().__init__(deq, sink)
        self._position = position

    @without_compiler
    def __call__(
        self, deq: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self.concerns(deq):
            return None
        i = self._position
        if len(args) > i:
            return (*args[:i], self._both(args[i]), *args[i + 1 :]), kwargs
        return args, {**kwargs, "backward_writer": self._both(kwargs.get("backward_writer"))}

    def _both(self, writer: Callable[[SolverStat], object] | None) -> Sink:
        """Return a writer that serves the caller's writer and the sink."""
        if writer is None:
            return self._sink

        def write(stats: SolverStat) -> None:
            writer(stats)
            self._sink(stats)

        return write


class _After(_Hook):
    """A forward hook that passes the statistics of a call on."""

    @without_compiler
    def __call__(self, deq: nn.Module, args: Any, output: Any) -> None:
        if self.concerns(deq) and isinstance(output, tuple):
            for item in output:
                if isinstance(item, SolverStat):
                    self._sink(item)


def _make_idle() -> Callable[..., None]:
    """Return a hook that does nothing."""
    return _idle


def _idle(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""
