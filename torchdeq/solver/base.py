"""What a solver is: a frozen dataclass of options with an update rule; the loop does the rest."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

from torch import Tensor

from torchdeq.linear import LINEAR
from torchdeq.packed import PackedFn
from torchdeq.registry import Registry, build
from torchdeq.stats import SolverStat, Trace
from torchdeq.stopping import StopRule


class Iterate(NamedTuple):
    """A point and its image, both (B, D).

    Args:
        z: where ``f`` was evaluated.
        fz: its image.
        g: the residual ``fz - z`` if the rule has it. It is read before the next step, so it may
            live in a buffer of the rule.
        x: the rule's answer at this point if that is not ``fz``.
        fresh: whether the answer is never written again; False if it lives in a buffer of the rule.
    """

    z: Tensor
    fz: Tensor
    g: Tensor | None = None
    x: Tensor | None = None
    fresh: bool = True

    @property
    def residual(self) -> Tensor:
        return self.fz - self.z if self.g is None else self.g

    def take(self, rows: Tensor) -> Iterate:
        """The same for some of the samples."""
        kept = (None if t is None else t.index_select(0, rows) for t in self[:4])
        return Iterate(*kept)  # type: ignore[arg-type]


class FixedPointFn:
    """``f`` on the packed matrix, counted against the budget."""

    def __init__(self, f: PackedFn, budget: int) -> None:
        self.f, self.budget, self.nfe = f, budget, 0

    @property
    def left(self) -> int:
        """Evaluations that may still be made."""
        return self.budget - self.nfe

    def spend(self) -> None:
        """Account for one evaluation, or for one product with the Jacobian."""
        if self.nfe >= self.budget:
            raise RuntimeError(f"a solver asked for more than its {self.budget} evaluations of f")
        self.nfe += 1

    def __call__(self, z: Tensor, into: Tensor | None = None) -> Tensor:
        """f(z), (B, D); ``into`` as for :class:`PackedFn`."""
        self.spend()
        fz = self.f(z, into)
        return fz.detach() if fz.requires_grad else fz  # f may switch gradients on for itself

    def keep(self, rows: Tensor) -> None:
        """Go on with some of the samples only."""
        self.f = self.f.take(rows)


@dataclass
class Problem:
    """One solve as the loop sees it: everything is packed."""

    f: FixedPointFn
    z0: Tensor  # (B, D)
    stop: StopRule
    record: tuple[int, ...] = ()  # evaluations after which the best state so far is wanted
    compact: bool = False
    bar: Tensor | None = None  # (B,) residuals the start has already; -inf for a finished sample
    scale: Tensor | None = None  # (B,) what residuals are divided by
    shared: bool = False  # whether all samples keep the same iterate


@dataclass
class Outcome:
    """What a solve found, packed."""

    z: Tensor  # (B, D)
    states: list[Tensor]  # as many as were asked for
    trace: Trace
    nfe: int
    stats: SolverStat | None = None  # if the method has statistics of its own
    memory: Any = None  # of the rule, at the end


S = TypeVar("S")
Loop = Callable[["Solver[Any]", Problem], Outcome]


class Solver(ABC, Generic[S]):
    """An update rule. Subclasses are frozen dataclasses whose fields are the options.

    A rule says how to begin (:meth:`init`) and how to go from one iterate to the next
    (:meth:`step`). Counting, best-so-far, recording and stopping belong to the loop. A rule's
    memory is its own value, ``None`` or an object with ``take(rows)``; nothing is kept on the
    solver between calls.
    """

    #: Whether the solve watches its residuals; if not, nobody is told about failures.
    watches: ClassVar[bool] = True
    #: Whether a chain can go on from where it stopped, by the residuals it leaves.
    chains: ClassVar[bool] = True
    #: Whether the answer at an iterate is the point itself, not its image.
    answers_point: ClassVar[bool] = False
    #: Other names of options, from published interfaces.
    aliases: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def from_options(cls, name: str, options: Mapping[str, Any]) -> Self:
        """Return the rule with these options; raise `TypeError` for an unknown one."""
        return build(cls, f"solver {name!r}", options, cls.aliases)

    def at(self, f: FixedPointFn, z: Tensor) -> Iterate:
        """Evaluate ``f`` at ``z``: the first iterate of a solve."""
        fz = f(z)
        return Iterate(z, fz, fz - z, x=z) if self.answers_point else Iterate(z, fz)

    def init(self, it: Iterate) -> S:
        """The rule's memory after its first iterate."""
        raise NotImplementedError(f"{type(self).__name__} must define init or override run")

    def step(self, f: FixedPointFn, it: Iterate, state: S) -> tuple[Iterate, S]:
        """The next iterate. Calls ``f`` at least once and at most ``f.left`` times."""
        raise NotImplementedError(f"{type(self).__name__} must define step or override run")

    def run(self, problem: Problem, loop: Loop) -> Outcome:
        """Solve a packed problem; only methods that are not one update rule override this."""
        return loop(self, problem)


#: A backward solve can use both kinds of solver, so no name may stand for two of them.
SOLVERS: Registry[type[Solver[Any]]] = Registry("solver", apart_from=LINEAR)


def make_solver(name: str, options: Mapping[str, Any]) -> Solver[Any]:
    """Return a registered solver with these options; raise for an unknown name or option."""
    return SOLVERS[name].from_options(name, options)
