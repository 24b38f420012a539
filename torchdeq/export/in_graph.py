"""Solves that become part of a graph: a loop whose body is one evaluation of `f`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchdeq._torch import while_loop
from torchdeq.coupling import Coupling
from torchdeq.export.leaves import Leaves
from torchdeq.export.progress import Book, Progress, Report
from torchdeq.export.rules import Rule, make_rule
from torchdeq.export.separation import separated
from torchdeq.grad import Backward, Implicit, Phantom
from torchdeq.numbers import norm_dtype
from torchdeq.packed import aux_at, leaves_like, without_aux
from torchdeq.packing import Packing
from torchdeq.pytree import State
from torchdeq.solution import FixedPoint
from torchdeq.solver import Anderson, SimpleFixedPointIter, Solver
from torchdeq.stats import SolverStat
from torchdeq.stopping import StopRule

Map = Callable[[Leaves], Leaves]
Carried = tuple[Tensor, Leaves, Leaves, Leaves, Book]  # k, point, best states, memory, record


@dataclass(frozen=True)
class InGraph:
    """The solves of a model while it is exported; takes the place of `fixed_point` and `solve`.

    Args:
        mode: `"loop"` or `"unroll"`.
        solver: the solver of all solves; None for their own.
        stop: the stop rule of all solves; None for their own.
        reports: a report of each solve is appended.
    """

    mode: str
    solver: Solver[Any] | None = None
    stop: StopRule | None = None
    reports: list[Report] = field(default_factory=list)

    def __call__(
        self,
        f: Callable[..., Any],
        z0: State,
        args: tuple[Any, ...] = (),
        *,
        solver: Solver[Any] | None = None,
        backward: Backward | None = None,
        stop: StopRule | None = None,
        record: Sequence[Any] = (),
        keep_estimate: bool = False,
        coupled: Coupling = None,
        has_aux: bool = False,
        eps: float | None = None,
        shared: bool = False,
    ) -> FixedPoint[Any]:
        """Solve, as `fixed_point` does without a graph for gradients."""
        if record or shared:
            what = "recorded states" if record else "shared iterates"
            raise ValueError(f"{what} cannot be exported: a graph returns one state of each sample")
        packing = Packing(z0)
        maps = _in_leaves(packing, *separated(without_aux(f) if has_aux else f, args))
        leaves = tuple(_leaves(packing, z0))
        stop = self.stop or stop or StopRule()
        solver = self.solver or solver or Anderson()
        eps = max(eps or 0.0, torch.finfo(packing.dtype).eps)
        z, report = self._solve(maps, leaves, solver, stop, coupled is True, eps)
        if not keep_estimate:
            z = _attached(Implicit() if backward is None else backward, maps, z)
        self.reports.append(report)
        state = packing.rebuild(list(z))
        aux = aux_at(f, state, args) if has_aux else None
        return FixedPoint(state, [state], _stats(report, stop), aux)

    def _solve(
        self, f: Map, z0: Leaves, solver: Solver[Any], stop: StopRule, joint: bool, eps: float
    ) -> tuple[Leaves, Report]:
        """Return the solved state, and the report."""
        rule = make_rule(solver, joint)
        progress = Progress(stop, joint, eps, _root(z0, stop, joint))
        if isinstance(solver, SimpleFixedPointIter):
            return self._iterate_blindly(f, z0, rule, progress, solver.tau)
        body = _body(f, rule, progress)
        k = torch.zeros((), dtype=torch.int64, device=z0[0].device)
        start = tuple(t.clone() for t in z0)  # a loop may not carry one tensor twice
        carried = (k, start, tuple(t.clone() for t in z0), rule.start(z0), progress.start(z0))
        k, _, best, _, book = self._run(body, carried, progress)
        return best, progress.report(book, k, z0[0])

    def _run(self, body: Callable[..., Carried], carried: Carried, progress: Progress) -> Carried:
        """Run a body until every sample has finished, or the budget is spent."""
        most = progress.stop.max_iter
        if self.mode == "unroll" or not most:
            for _ in range(most):
                carried = body(*carried)
            return carried

        def goes_on(k: Tensor, *rest: Any) -> Tensor:
            within = k < most
            return within & progress.running(rest[-1]) if progress.finishes else within

        result: Carried = _loop(goes_on, body, carried)
        return result

    def _iterate_blindly(
        self, f: Map, z0: Leaves, rule: Rule, progress: Progress, tau: float
    ) -> tuple[Leaves, Report]:
        """Return the last state of plain iteration without checks, and the report about it."""
        most = progress.stop.max_iter

        def goes_on(k: Tensor, before: Leaves, z: Leaves) -> Tensor:
            return k < most

        def body(k: Tensor, before: Leaves, z: Leaves) -> tuple[Tensor, Leaves, Leaves]:
            point, _ = rule.next((), k, z, f(z))
            return k + 1, tuple(t.clone() for t in z), point

        k = torch.zeros((), dtype=torch.int64, device=z0[0].device)
        before, z = tuple(t.clone() for t in z0), tuple(t.clone() for t in z0)
        if self.mode == "unroll" or not most:
            for _ in range(most):
                k, before, z = body(k, before, z)
        else:
            k, before, z = _loop(goes_on, body, (k, before, z))
        if not most:
            return z, progress.report(progress.start(z0), k, z0[0])
        return z, progress.report_last(before, z, k, tau)


def _loop(goes_on: Callable[..., Tensor], body: Callable[..., Any], carried: Any) -> Any:
    """Return the result of a loop in the graph; raise `RuntimeError` for a body without one."""
    try:
        return while_loop(goes_on, body, carried)
    except RuntimeError as error:
        raise RuntimeError(
            "f cannot be traced whole, which the loop of an exported solve needs; a solve inside "
            f"of f needs mode='unroll'. The error of torch: {error}"
        ) from error


def _body(f: Map, rule: Rule, progress: Progress) -> Callable[..., Carried]:
    """Return the body of the loop: one evaluation of `f`."""

    def body(k: Tensor, z: Leaves, best: Leaves, memory: Leaves, book: Book) -> Carried:
        fz = f(z)
        book, better = progress.observe(book, k, z, fz)
        best = progress.take_better(better, rule.answer(z, fz), best)
        point, memory = rule.next(memory, k, z, fz)
        return k + 1, point, best, memory, book

    return body


def _in_leaves(packing: Packing, f: Callable[..., State], args: tuple[Any, ...]) -> Map:
    """Return `f` as a function of the tensors of the state."""
    template, dtype = packing.template, packing.dtype
    unpacks = isinstance(template, (tuple, list))

    def call(leaves: Leaves) -> Leaves:
        state = packing.rebuild(list(leaves))
        out = f(*state, *args) if unpacks else f(state, *args)
        return tuple(t.to(dtype) for t in leaves_like(template, out, "f's output"))

    return call


def _leaves(packing: Packing, z0: State) -> list[Tensor]:
    return list(leaves_like(packing.template, z0, "z0"))


def _attached(backward: Backward, f: Map, z: Leaves) -> Leaves:
    """Return the state that a backward pass would attach: its steps are part of the value."""
    if isinstance(backward, Implicit):
        return f(z)
    if not isinstance(backward, Phantom):
        raise ValueError(
            f"{type(backward).__name__} runs an iteration of its own, which cannot be exported: "
            "choose Implicit() or Phantom()"
        )
    for _ in range(backward.grad):
        fz = f(z)
        if backward.tau != 1:
            fz = tuple(torch.lerp(a, b, backward.tau) for a, b in zip(z, fz, strict=True))
        z = fz
    return z


def _root(z0: Leaves, stop: StopRule, joint: bool) -> Tensor | None:
    """Return the divisor of norms for `norm="rms"`, as a tensor: the batch may have any size."""
    if stop.norm != "rms":
        return None
    samples = (t if joint else t[:1] for t in z0)
    wide = norm_dtype(z0[0].dtype)
    return torch.stack([torch.ones_like(t, dtype=wide).sum() for t in samples]).sum().sqrt()


def _stats(report: Report, stop: StopRule) -> SolverStat:
    """Return statistics whose values are tensors of the graph; those that it lacks are -1."""
    name = "rel_lowest" if stop.mode == "rel" and stop.rtol is None else "abs_lowest"
    values = {name: report.residual, "nstep": report.steps}
    return SolverStat(values, nfe=report.evaluations, status=report.status)  # type: ignore[arg-type]
