"""The typed entry point: solve a fixed point and make it differentiable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor

from torchdeq._torch import transforms_active
from torchdeq.coupling import Coupling, check_coupling
from torchdeq.distributed.peers import find_peers
from torchdeq.failures import check_policy, report_failures
from torchdeq.grad import Backward, Implicit, IteratingBackward
from torchdeq.grad.base import NoGraph, with_gradient_of, with_zero_gradient_to
from torchdeq.grad.capture import rehearse
from torchdeq.grad.equilibrium import attach_exactly, solve_with_all_inputs
from torchdeq.grad.explicit import Map
from torchdeq.packed import PackedFn, aux_at, without_aux
from torchdeq.packing import Packing
from torchdeq.pytree import S
from torchdeq.solution import FixedPoint
from torchdeq.solver import Anderson, Broyden, FixedPointIter, Solver, solve
from torchdeq.solver.loop import solve_packed
from torchdeq.stats import SolverStat, untraced_solve
from torchdeq.stopping import StopRule
from torchdeq.tracing import graph_solver


@untraced_solve
def fixed_point(
    f: Callable[..., Any],
    z0: S,
    args: tuple[Any, ...] = (),
    *,
    solver: Solver[Any] | None = None,
    backward: Backward | None = None,
    stop: StopRule | None = None,
    record: Sequence[tuple[int, Backward]] = (),
    compact: bool = False,
    on_failure: str = "warn",
    keep_estimate: bool = False,
    coupled: Coupling = None,
    has_aux: bool = False,
) -> FixedPoint[S]:
    r"""Solve $z^\star = f(z^\star)$ and attach the gradient of $z^\star$.

    Gradients reach the parameters of modules in `f`, the tensors that `f` closes over, and `args`.
    The result has a graph if the grad mode is on.

    Args:
        f: called as `f(z, *args)`, or `f(*z, *args)` for a tuple or list state.
        z0: the start. Its gradient is zero, except for a budget of 0 and reversible iterations.
        args: further arguments of `f`.
        solver: the forward solver; Anderson acceleration if None. A reversible backward runs an
            iteration of its own.
        backward: the method of differentiation; implicit differentiation by GMRES if None.
        stop: budget and tolerance of the forward solve.
        record: pairs of a number of evaluations and a `Backward`. The state after that many
            evaluations is returned as well, and that backward makes it differentiable.
        compact: finished samples leave the batch; the first dimension of every tensor in `args`
            must be the batch.
        on_failure: how to report samples that did not converge: `"ignore"`, `"warn"`, `"raise"`, or
            `"auto"`, which warns, but not about a spent budget.
        keep_estimate: return the estimate of the solver, bit for bit, with the gradient of the
            state that the backward pass attaches; False returns the attached state itself.
        coupled: True if samples depend on each other (nodes of a graph, steps of a chain, batch
            statistics): both solves take the batch as one system with one status. `"adjoint"`
            solves sample by sample and differentiates as one system. False if samples are
            independent. None tests for dependence by one product in the backward pass.
        has_aux: `f` returns `(z, aux)`. One more evaluation, at the returned state, computes the
            `aux` that comes back, so gradients of `aux` are complete.
    """
    check_coupling(coupled, compact)
    in_graph = graph_solver()
    if in_graph is not None:
        exported: FixedPoint[S] = in_graph(
            f, z0, args, solver=solver, backward=backward, stop=stop, record=record,
            keep_estimate=keep_estimate, coupled=coupled, has_aux=has_aux,
        )  # fmt: skip
        return exported
    packing = Packing(z0)
    packed = PackedFn(packing, without_aux(f) if has_aux else f, args, coupled)
    backward = Implicit() if backward is None else backward
    stop = StopRule() if stop is None else stop
    _check(backward, stop, record, on_failure, keep_estimate)
    packed.peers = find_peers(f, stop.sync_stop, packing.device)
    request = _Request(
        packed, packing.pack(z0), solver, stop, tuple(record), compact, on_failure, keep_estimate
    )
    with packed.peers.forward():
        states, stats = request.run(backward)
    shaped = [packing.rebuild(tensors) for tensors in states]
    return FixedPoint(shaped[-1], shaped, stats, aux_at(f, shaped[-1], args) if has_aux else None)


def _check(
    backward: object, stop: object, record: Sequence[object], on_failure: str, keep_estimate: bool
) -> None:
    """Raise for an argument of the wrong kind, and for options that exclude each other."""
    if not isinstance(backward, Backward):
        raise TypeError(
            f"backward must be a Backward such as Implicit() or Phantom(grad=5), got {backward!r}"
        )
    if not isinstance(stop, StopRule):
        raise TypeError(f"stop must be a StopRule such as StopRule(max_iter=40), got {stop!r}")
    check_policy(on_failure)
    for item in record:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], Backward)):
            raise TypeError(f"record takes pairs (evaluations, Backward), got {item!r}")
        if isinstance(item[1], IteratingBackward):
            raise ValueError(
                "a method with an iteration of its own cannot be attached to a recorded state: "
                f"record it with Implicit() or Phantom(), got {item[1]!r}"
            )
    if record and keep_estimate:
        raise ValueError("keep_estimate=True returns one state: drop it, or drop record")


States = tuple[list[list[Tensor]], SolverStat]


@dataclass(frozen=True)
class _Request:
    """One call of `fixed_point` with its state packed."""

    f: PackedFn
    z0: Tensor  # (B, D), with its graph
    solver: Solver[Any] | None
    stop: StopRule
    record: tuple[tuple[int, Backward], ...]
    compact: bool
    on_failure: str
    keep_estimate: bool

    @property
    def rule(self) -> Solver[Any]:
        """Return the forward solver: that of the caller, or the default."""
        return Anderson() if self.solver is None else self.solver

    def run(self, backward: Backward) -> States:
        """Return differentiable states, the answer last, and the statistics."""
        if isinstance(backward, IteratingBackward):
            return self._run_iteration(backward)
        if (_is_higher_order(backward) or transforms_active()) and self.compact:
            raise ValueError(
                "compact=True cannot be combined with higher_order=True, torch.func transforms or "
                "forward mode: they need the whole batch again in the backward pass"
            )
        if (_is_higher_order(backward) or transforms_active()) and self.f.peers.units:
            raise RuntimeError(
                "f contains modules that fully_shard has made units, whose parameters exist only "
                "while they are gathered: higher_order=True, torch.func transforms and forward "
                "mode need them as inputs; call fully_shard on the module whose forward contains "
                "the solve instead, or differentiate once"
            )
        solve = self._solve_in_transform if transforms_active() else self._solve
        states, stats = solve(backward)
        unrolled = not self.stop.max_iter and not isinstance(backward, Implicit)
        if torch.is_grad_enabled() and not unrolled:
            start = self.f.packing.split(self.z0)
            states = [with_zero_gradient_to(start, tensors) for tensors in states]
        return states, stats

    def _solve(self, backward: Backward) -> States:
        """Solve without a graph, then attach one at the solved states."""
        f = self.f
        shine = isinstance(backward, Implicit) and backward.init == "shine"
        if shine:
            self._check_shine()
        outcome, stats = solve_packed(
            f, self.z0, self.rule, self.stop, [k for k, _ in self.record],
            compact=self.compact, on_failure=self.on_failure, keep_memory=shine,
        )  # fmt: skip
        if self.keep_estimate and not torch.is_grad_enabled():
            return [f.packing.split(outcome.z)], stats
        states: list[list[Tensor]] = []
        for z_k, (_, method) in zip(outcome.states, self.record, strict=True):
            states += _attach(method, f, z_k)
        if isinstance(backward, Implicit):
            backward = backward.with_memory(outcome.memory)
        # Without a solve, the start keeps its graph: backpropagation through time reaches it.
        z = outcome.z if self.stop.max_iter else self.z0
        if not self.keep_estimate:
            return [*states, *_attach(backward, f, z)], stats
        estimate = f.packing.split(z.detach())
        try:
            attached = _attach(backward, f, z)[-1]
        except NoGraph:  # nothing to differentiate: return the estimate alone
            return [estimate], stats
        return [with_gradient_of(estimate, attached)], stats

    def _check_shine(self) -> None:
        """Raise unless the forward solve leaves the inverse Jacobian that `init='shine'` needs."""
        if not isinstance(self.rule, Broyden) or self.compact or self.f.coupled is True:
            raise ValueError(
                "init='shine' reuses the inverse Jacobian of the forward solve, which must be "
                f"Broyden's on the whole batch: got {type(self.rule).__name__} with "
                f"compact={self.compact}, coupled={self.f.coupled}"
            )

    def _run_iteration(self, backward: IteratingBackward) -> States:
        """Run a backward that iterates itself, in the place of a solve."""
        name = type(backward).__name__
        if self.solver not in (None, FixedPointIter()):
            raise ValueError(
                f"{name} runs an iteration of its own: the solver must be fixed_point_iter without "
                f"options, got {self.solver}"
            )
        if self.record or self.compact:
            raise ValueError(
                f"{name} returns the last state of its iteration, for the whole batch: drop "
                + ("record" if self.record else "compact=True")
            )
        states, stats = backward.run(self.f, self.z0, self.stop)
        if self.on_failure != "ignore" and self.stop.goal and self.stop.max_iter:
            report_failures(stats, self.on_failure, f"the iteration of {name}")
        return states, stats

    def _solve_in_transform(self, backward: Backward) -> States:
        """Solve inside a function transform: every tensor that `f` uses becomes an input."""
        f, start = self.f, self.z0.detach()
        states: list[list[Tensor]] = []
        inputs = rehearse(f, start)
        # A function transform cannot look into a solve: each recorded state has its own solve.
        for k, method in (*self.record, (self.stop.max_iter, backward)):
            z, stats, inputs = solve_with_all_inputs(
                f, start, self._row_solver(k), method, inputs, self.keep_estimate
            )
            if isinstance(method, Implicit):
                states.append(f.packing.split(z.clone()))  # the caller may write into it
            else:
                states += method.attach(f, z.detach() if self.stop.max_iter else self.z0)
        if self.keep_estimate and not isinstance(backward, Implicit):
            states = [with_gradient_of(f.packing.split(z.detach()), states[-1])]
        return states, stats

    def _row_solver(self, max_iter: int) -> Callable[[Map, Tensor], FixedPoint[Tensor]]:
        """Return a function that solves for the fixed point of a map of rows."""
        stop = replace(self.stop, max_iter=max_iter)
        return lambda f, rows: solve(f, rows, self.rule, stop, on_failure=self.on_failure)


def _attach(backward: Backward, f: PackedFn, z: Tensor) -> list[list[Tensor]]:
    """Return differentiable states that start from a solved one."""
    if _is_higher_order(backward):
        return [attach_exactly(backward, f, z)]
    return backward.attach(f, z)


def _is_higher_order(backward: Backward) -> TypeGuard[Implicit]:
    """Return whether a backward makes gradients that can be differentiated again."""
    return isinstance(backward, Implicit) and backward.higher_order and torch.is_grad_enabled()
