"""The base class of solvers, their registry, and the types that a solver and the loop exchange."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

from torch import Tensor

from torchdeq.linear import LINEAR
from torchdeq.packed import PackedFn
from torchdeq.registry import Registry, build
from torchdeq.stats import SolverStat
from torchdeq.stopping import StopRule
from torchdeq.trace import Trace

#: Numbers in a state up to which keeping many states costs less than comparing each at once.
SMALL = 1 << 13


class Iterate(NamedTuple):
    """A point and its image, both (B, D).

    Attributes:
        z: the point at which the solver evaluated `f`.
        fz: its image.
        g: the residual `fz - z` if the solver has computed it. It may be in a buffer of the
            solver: the loop reads it before the next step.
        x: the answer of the solver at this point if that is not `fz`.
        fresh: whether the solver never writes into the answer again; False if the answer is in a
            buffer of the solver.
        lasts: if the answer is in a buffer: how many further steps leave it unchanged.
        square: (B,) the squares $|g|^2$ if the solver has computed them.
        moderate: whether the host knows that no $|g|$ is very large or small.
    """

    z: Tensor
    fz: Tensor
    g: Tensor | None = None
    x: Tensor | None = None
    fresh: bool = True
    lasts: int = 0
    square: Tensor | None = None
    moderate: bool = False

    @property
    def answer(self) -> Tensor:
        """Return the answer of the solver at this point, `x` or `fz`."""
        return self.fz if self.x is None else self.x

    @property
    def residual(self) -> Tensor:
        """Return the residual `fz - z`: `g`, or computed if `g` is None."""
        return self.fz - self.z if self.g is None else self.g

    def take(self, rows: Tensor) -> Iterate:
        """Return the iterate of some of the samples."""
        parts = (None if t is None else t.index_select(0, rows) for t in self[:4])
        return Iterate(*parts)  # type: ignore[arg-type]


class FixedPointFn:
    """The map `f` on the packed matrix, with a budget of evaluations.

    Args:
        f: the packed map.
        budget: evaluations, at most.
        reads: whether a solver may read values from the device: the solve has a tolerance, or the
            values are in the memory of the host.
    """

    def __init__(self, f: PackedFn, budget: int, reads: bool = True) -> None:
        self.packed, self.budget, self.nfe, self.reads = f, budget, 0, reads

    @property
    def left(self) -> int:
        """Return how many evaluations the budget still allows."""
        return self.budget - self.nfe

    def spend(self) -> None:
        """Count one evaluation, or one product with the Jacobian; raise if the budget is spent."""
        if self.nfe >= self.budget:
            raise RuntimeError(f"a solver asked for more than its {self.budget} evaluations of f")
        self.nfe += 1

    def __call__(self, z: Tensor, into: Tensor | None = None) -> Tensor:
        """Return f(z), (B, D); `into` as for `PackedFn`."""
        self.spend()
        fz = self.packed(z, into)
        return fz.detach() if fz.requires_grad else fz  # f may switch gradients on for itself

    def any_process(self, flag: bool) -> bool:
        """Return whether a flag is set in any process that evaluates `f` together with this one.

        A solver whose step decides on the host whether to evaluate `f` again must ask this, so that
        all processes evaluate `f` equally often.
        """
        return self.packed.peers.any(flag)

    def keep(self, rows: Tensor) -> None:
        """Evaluate only some of the samples from now on."""
        self.packed = self.packed.take(rows)


@dataclass
class Problem:
    """A packed fixed-point problem with its stop rule."""

    f: FixedPointFn
    z0: Tensor  # (B, D)
    stop: StopRule
    record: tuple[int, ...] = ()  # evaluations after which to record the best state so far
    compact: bool = False  # whether finished samples leave the batch
    lowest: Tensor | None = None  # (B,) residuals of the start; -inf for a finished sample
    scale: Tensor | None = None  # (B,) divisors of the residuals
    shared: bool = False  # whether all samples keep the same iterate


@dataclass
class Outcome:
    """The packed result of a solve."""

    z: Tensor  # (B, D)
    states: list[Tensor]  # the recorded states, as many as `Problem.record` has entries
    trace: Trace
    nfe: int
    stats: SolverStat | None = None  # None: the loop computes them from the trace
    memory: Any = None  # the state of the solver after its last step


S = TypeVar("S")
Loop = Callable[["Solver[Any]", Problem], Outcome]


class Solver(ABC, Generic[S]):
    """The base class of solvers. Subclasses are frozen dataclasses whose fields are the options.

    A solver is an update rule: `init` makes its state from the first iterate, `step` returns the
    next iterate and the next state. The loop counts evaluations, keeps the best answer of each
    sample, records and stops. The state is `None` or an object with `take(rows)`, which returns the
    state of some of the samples; a solver itself stores nothing between calls.

    A solver that `streams` can start single samples again while the others go on: after `put`, its
    next step evaluates `f` at new points for them, without a memory of what was in their rows
    before. Its state, if not `None`, has `put(rows, z)`, too: the counterpart of `take`, which
    changes the state in place. A step of such a solver evaluates `f` exactly once and treats every
    sample on its own.

    Class attributes describe a solver to the library and to its tests, which run for every
    registered solver. A subclass overrides those whose default is wrong for it:

    - `watches`: the solver checks its residuals and stops at the tolerance. The library reports no
      failure of a solver that does not.
    - `chains`: the solver returns the residuals of its iterates, so that `Auto` can continue with
      the samples it did not solve.
    - `answers_point`: the answer at an iterate is the point $z$, not its image $f(z)$.
    - `needs_contraction`: without damping, the solver converges in general only if `f` contracts.
    - `plans_by_budget`: the steps depend on the whole budget, so that a solve with a smaller budget
      is not the beginning of one with a larger budget.
    - `options_without_jvp`: options with which the solver only evaluates `f`, for maps without
      forward-mode differentiation. They are empty for a solver that never differentiates `f`.
    - `aliases`: other names of options, from published interfaces.
    """

    watches: ClassVar[bool] = True
    chains: ClassVar[bool] = True
    answers_point: ClassVar[bool] = False
    needs_contraction: ClassVar[bool] = False
    plans_by_budget: ClassVar[bool] = False
    options_without_jvp: ClassVar[Mapping[str, Any]] = {}
    aliases: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def from_options(cls, name: str, options: Mapping[str, Any]) -> Self:
        """Return the solver with these options; raise `TypeError` for an unknown one."""
        return build(cls, f"solver {name!r}", options, cls.aliases)

    def at(self, f: FixedPointFn, z: Tensor) -> Iterate:
        """Evaluate `f` at `z` and return the first iterate of a solve."""
        fz = f(z)
        return Iterate(z, fz, fz - z, x=z) if self.answers_point else Iterate(z, fz)

    def init(self, it: Iterate) -> S:
        """Return the state of the solver after its first iterate."""
        raise NotImplementedError(f"{type(self).__name__} must define init or override run")

    def step(self, f: FixedPointFn, it: Iterate, state: S) -> tuple[Iterate, S]:
        """Return the next iterate and state. Call `f` at least once, at most `f.left` times."""
        raise NotImplementedError(f"{type(self).__name__} must define step or override run")

    @property
    def streams(self) -> bool:
        """Return whether single samples can start again while the others go on; see `put`."""
        return False

    def put(self, it: Iterate, state: S, rows: Tensor, z: Tensor) -> Iterate:
        """Start some samples again, with an empty memory: the next step evaluates `f` at `z`.

        The next step treats that evaluation as the first one of these samples.

        Args:
            it: the last iterate.
            state: the state after it, changed in place.
            rows: the numbers of these samples, on the host: counting their steps reads nothing.
            z: (n, D) their starts, on the device.

        Returns:
            The iterate from which the next step goes on.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot start single samples again")

    def run(self, problem: Problem, loop: Loop) -> Outcome:
        """Solve a packed problem; override this only for a solver that is not one update rule."""
        return loop(self, problem)


#: Apart from the linear solvers: a backward solve can use both kinds, by name.
SOLVERS: Registry[type[Solver[Any]]] = Registry("solver", apart_from=LINEAR)


def make_solver(name: str, options: Mapping[str, Any]) -> Solver[Any]:
    """Return a registered solver with these options; raise for an unknown name or option."""
    return SOLVERS[name].from_options(name, options)
