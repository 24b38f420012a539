"""The quality of a gradient: any backward pass against the exact gradient of the fixed point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchdeq.coupling import Coupling
from torchdeq.diagnostics.guarding import leaving_modules
from torchdeq.functional import fixed_point
from torchdeq.grad import Backward, Implicit
from torchdeq.linear import GMRES
from torchdeq.packed import PackedFn
from torchdeq.packing import Packing
from torchdeq.pytree import State, map_tensors, tensors_of
from torchdeq.randomness import Randomness
from torchdeq.solver import Broyden, FixedPointIter, Solver
from torchdeq.stats import SolverStat
from torchdeq.stopping import StopRule

Loss = Callable[[Any], Tensor]


@dataclass(frozen=True)
class GradientQuality:
    """A gradient beside the exact one, over all parameters together.

    Args:
        cosine: of the angle between the two: 1 is the same direction.
        norm_ratio: the length of the gradient over that of the exact one.
        reference_residual: the relative residual of the solves behind the exact gradient, forward
            or adjoint, whichever is larger; if it is not small, neither number says much.
        inputs: the number of parameters and other leaves that were compared; 0 if `f` has none, and
            an additional input of `f`, `f(z) + e`, takes their place.
    """

    cosine: float
    norm_ratio: float
    reference_residual: float
    inputs: int


class GradientReference:
    """The exact gradient of a loss of the fixed point, to compare others with.

    The forward solve is Broyden's to a small residual, the adjoint is solved by GMRES. With a state
    `z`, one evaluation of plain iteration replaces the forward solve. `f` is not changed, and no
    `.grad` is written.

    Args:
        f: called as `f(z, *args)`, or `f(*z, *args)` for a tuple or list state.
        z0: the start.
        args: further arguments of `f`.
        z: the state to differentiate at, if it is solved; saves the forward solve.
        loss: from the state to a number; by default a random linear function of the state.
        coupled: as in `fixed_point`.
        max_iter: evaluations and products of the two solves.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        z0: State,
        args: tuple[Any, ...] = (),
        *,
        z: State | None = None,
        loss: Loss | None = None,
        coupled: Coupling = None,
        max_iter: int = 300,
    ) -> None:
        self.z0, self.args, self.coupled = z0, args, coupled
        self.packing = Packing(z0)
        if not self.packing.batch:
            raise ValueError(f"a batch without samples has no gradient: z0 is {_shapes(z0)}")
        self._loss = loss or _random_loss(self.packing)
        if loss is not None:
            check_loss(loss, z0)
        self.leaves = graph_leaves(f, z0 if z is None else z, args)
        self._e: list[Tensor] = []
        self.f = f
        if not self.leaves:
            self._e = [torch.zeros_like(t) for t in self.packing.split(self.packing.pack(z0))]
            self.leaves = [e.requires_grad_() for e in self._e]
            self.f = _with_additive_input(f, self._e)
        eps = torch.finfo(self.packing.dtype).eps
        self._forward_stats: SolverStat | None = None
        self._backward_stats: SolverStat | None = None
        implicit = Implicit(
            solver=GMRES(), stop=StopRule(max_iter, max(1e-8, 10 * eps)), on_failure="ignore",
            writer=self._keep,
        )  # fmt: skip
        if z is None:
            forward = StopRule(max_iter, max(1e-7, 30 * eps), "rel")
            self.exact = self.gradient(implicit, solver=Broyden(), stop=forward)
            self._forward_stats = self._last_stats
        else:
            self.exact = self.gradient_at(z, implicit)

    @property
    def residual(self) -> float:
        """Return the worst relative residual of the solves behind the exact gradient."""
        forward, backward = self._forward_stats, self._backward_stats
        worst = [forward["rel_lowest"].max()] if forward is not None else []
        worst += [backward["abs_lowest"].max()] if backward is not None else []
        return max((float(r.nan_to_num(nan=torch.inf)) for r in worst), default=0.0)

    def gradient(
        self, backward: Backward, *, solver: Solver[Any], stop: StopRule, start: State | None = None
    ) -> Tensor:
        """Return the gradient by all leaves as one vector in float64, on the CPU."""
        with torch.enable_grad():
            solution = fixed_point(
                self.f, self.z0 if start is None else start, self.args, solver=solver,
                backward=backward, stop=stop, on_failure="ignore", coupled=self.coupled,
            )  # fmt: skip
            self._last_stats = solution.stats
            value = self._loss(solution.z)
            if not value.requires_grad:
                return torch.zeros(sum(t.numel() for t in self.leaves), dtype=torch.float64)
            grads = torch.autograd.grad(value, self.leaves, allow_unused=True, retain_graph=True)
        pairs = zip(grads, self.leaves, strict=True)
        flat = [torch.zeros_like(t) if g is None else g for g, t in pairs]
        return torch.cat([g.detach().flatten().cpu().double() for g in flat])

    def gradient_at(self, z: State, backward: Backward) -> Tensor:
        """Return the gradient at a solved state, after one evaluation of `f`."""
        return self.gradient(backward, solver=FixedPointIter(), stop=StopRule(1, 0.0), start=z)

    def compare(self, gradient: Tensor) -> GradientQuality:
        """Return the quality of a gradient that the method `gradient` returned."""
        exact, length = self.exact, float(self.exact.norm())
        own = float(gradient.norm())
        product = length * own
        both_zero = length == own == 0
        cosine = float(gradient @ exact) / product if product else float(both_zero)
        ratio = own / length if length else float("inf") if own else 1.0
        inputs = 0 if self._e else len(self.leaves)
        return GradientQuality(cosine, ratio, self.residual, inputs)

    def _keep(self, stats: SolverStat) -> None:
        self._backward_stats = stats


@leaving_modules
def gradient_quality(
    f: Callable[..., Any],
    z0: State,
    backward: Backward,
    args: tuple[Any, ...] = (),
    *,
    solver: Solver[Any] | None = None,
    stop: StopRule | None = None,
    loss: Loss | None = None,
    coupled: Coupling = None,
) -> GradientQuality:
    """Compare the gradient of a backward pass with the exact gradient of the fixed point.

    The error has two sources: a forward solve that stops early, and a backward pass that
    approximates. Parameters, tensors that `f` closes over and `args` are all compared.

    Args:
        f: called as `f(z, *args)`, or `f(*z, *args)` for a tuple or list state.
        z0: the start.
        backward: the method, e.g. `Phantom(grad=5, tau=0.8)`.
        args: further arguments of `f`.
        solver: the forward solver; Broyden's by default.
        stop: budget and tolerance of the forward solve; by default 300 evaluations, 1e-6 relative.
        loss: from the state to a number; by default a random linear function of the state.
        coupled: as in `fixed_point`.
    """
    reference = GradientReference(f, z0, args, loss=loss, coupled=coupled)
    solver = Broyden() if solver is None else solver
    stop = StopRule(300, 1e-6, "rel") if stop is None else stop
    if isinstance(backward, Implicit):
        backward = replace(backward, on_failure="ignore")
    return reference.compare(reference.gradient(backward, solver=solver, stop=stop))


def graph_leaves(f: Callable[..., Any], z: State, args: tuple[Any, ...] = ()) -> list[Tensor]:
    """Return the leaves with a gradient that `f(z)` depends on, other than the state itself."""
    packing = Packing(z)
    h = packing.pack(z).detach().requires_grad_()
    with torch.enable_grad():
        fz = PackedFn(packing, f, args)(h)
    leaves: dict[int, Tensor] = {}
    visited, pending = set(), [fz.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and leaf is not h:
            leaves[id(leaf)] = leaf
        pending.extend(parent for parent, _ in node.next_functions)
    return list(leaves.values())


def check_loss(loss: Loss, z0: State) -> None:
    """Raise `ValueError` unless a loss is one number that depends on the state."""
    with torch.enable_grad():
        value = loss(map_tensors(z0, lambda t: t.detach().clone().requires_grad_()))
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"loss must return a tensor with one number, got {got}")
    if not value.requires_grad:
        raise ValueError("loss must depend on the state: it detaches, or runs under no_grad")


def _shapes(z: State) -> list[tuple[int, ...]]:
    return [tuple(t.shape) for t in tensors_of(z)]


def _with_additive_input(f: Callable[..., Any], e: Sequence[Tensor]) -> Callable[..., Any]:
    """Return `f(z) + e`, whose gradient by `e` is the adjoint vector itself."""

    def shifted(*inputs: Any) -> State:
        out = f(*inputs)
        packing = Packing(out)
        tensors = packing.split(packing.pack(out))
        return packing.rebuild([t + d for t, d in zip(tensors, e, strict=True)])

    return shifted


def _random_loss(packing: Packing) -> Loss:
    """Return a random linear function of a state, the same at every call."""
    with Randomness(packing.device).replayed():
        torch.manual_seed(0)
        shape = (packing.batch, sum(packing.sizes))
        weights = torch.randn(shape, dtype=packing.dtype, device=packing.device)
        weights /= max(1, weights.numel()) ** 0.5

    def loss(z: State) -> Tensor:
        # In rows of each leaf: the state may come back as a list instead of a tuple.
        return (packing.pack(z) * weights).sum()

    return loss
