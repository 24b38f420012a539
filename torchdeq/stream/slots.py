"""The slots of a stream on the device: states, arguments of `f` and the memory of the solver."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchdeq.solver.base import Iterate, Solver
from torchdeq.solver.best_states import BestStates
from torchdeq.stream.isolation import IsolatingFn
from torchdeq.stream.layout import Layout


class Slots:
    """The rows of the running batch. A step evaluates `f` once, on all of them.

    Args:
        layout: of the samples.
        f: the packed map, whose `args` are those of the rows.
        solver: the update rule.
    """

    def __init__(self, layout: Layout, f: IsolatingFn, solver: Solver[Any]) -> None:
        self._layout, self._f, self._solver = layout, f, solver
        self._args: list[Tensor] = []  # (b, ...) each; written in place when samples enter
        self._own = True  # whether nobody else uses their memory
        self._z0: Tensor | None = None  # (b, D) the starts of a batch that has not begun
        self._it: Iterate | None = None
        self._state: Any = None
        self.best: BestStates | None = None

    def start(self, z: Tensor, args: list[Tensor]) -> None:
        """Begin with new samples in all rows."""
        self._z0, self._it, self._state = z, None, None
        self.best = BestStates(z)
        self._set_args(args)
        self._own = False  # the tensors belong to the caller until samples enter

    def enter(self, rows: Tensor, z: Tensor, args: list[Tensor]) -> None:
        """Replace the samples in some rows by new ones, with an empty memory of the solver.

        Args:
            rows: their numbers, on the host.
            z: (n, D) their starts.
            args: (n, ...) each, their arguments of `f`.
        """
        assert self._it is not None
        self._it = self._solver.put(self._it, self._state, rows, z)
        at = rows.to(z.device)
        if not self._own:
            self._set_args([t.clone() for t in self._args])
        for old, new in zip(self._args, args, strict=True):
            old.index_copy_(0, at, new)

    def take(self, rows: Tensor) -> None:
        """Keep the given rows only, in this order; a row may appear more than once."""
        assert self._it is not None
        assert self.best is not None
        at = rows.to(self._it.z.device)
        self._it = self._it.take(at)
        self._state = None if self._state is None else self._state.take(rows)
        self._set_args([t.index_select(0, at) for t in self._args])
        self.best.keep(at)

    def step(self) -> Iterate:
        """Evaluate `f` once on all rows and return the iterate."""
        if self._it is None:
            assert self._z0 is not None
            it = self._solver.at(self._f, self._z0)
            self._state, self._z0 = self._solver.init(it), None
        else:
            it, self._state = self._solver.step(self._f, self._it, self._state)
        self._it = it
        return it

    def clear(self) -> None:
        """Forget everything: no row is in use."""
        self._z0 = self._it = self._state = self.best = None
        self._set_args([])

    def _set_args(self, args: list[Tensor]) -> None:
        self._args, self._own = args, True
        self._f.packed.args = self._layout.rebuild_args(args) if args else ()
        self._f.own.guard(args)
