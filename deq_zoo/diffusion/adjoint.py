"""The exact gradient of the states of a chain: its adjoint, solved in parallel or step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deq_zoo.checks import check_fields
from deq_zoo.diffusion.chain import ParallelChain, precision
from torchdeq import StopRule, solve
from torchdeq.solver import make_solver


@dataclass(frozen=True)
class Adjoint:
    r"""The solver of the adjoint states $\mu_k = d\ell / d z_k$.

    $$\mu_k = h_k + a_k \mu_{k+1} + (\partial r_k / \partial z_k)^\top \mu_{k+1},
    \qquad \mu_T = h_T$$

    with $h_k$ the explicit gradient of the loss at each state. The recursion is the chain in
    reverse, and again a triangular fixed point: the products of all steps in a window are one
    batch.

    Args:
        window: steps solved at once, from the last to the first; 1 is the reverse sweep, one
            product for each step; 0 solves all steps at once.
        solver: of a window of several steps, by its registered name.
        tol: relative residual of each image in a window of several steps.
        max_iter: products in a window; 0 allows as many as the window has steps, after which plain
            iteration is exact.
        on_failure: how to report images whose adjoint did not converge: ignore, warn or raise.
    """

    window: int = 1
    solver: str = "anderson"
    tol: float = 1e-6
    max_iter: int = 0
    on_failure: str = "warn"

    def __post_init__(self) -> None:
        check_fields(self, 0, "window", "max_iter")

    def states(self, chain: ParallelChain, inputs: Tensor, h: Tensor) -> tuple[Tensor, Work]:
        """Return the adjoint of every state, initial noise first: (B, T + 1, C, H, W).

        Args:
            chain: the chain.
            inputs: (B, T, C, H, W), the input of the network at each step.
            h: (B, T + 1, C, H, W), the explicit gradient of the loss at each state.
        """
        mu, work, end = h.clone(), Work(), len(chain)
        while end > 0:
            first = max(0, end - (self.window or end))
            span = _Span(chain, inputs[:, first:end], first, work)
            own, later = h[:, first:end], mu[:, end]
            if end - first == 1:
                mu[:, first] = span.sweep(later[:, None], own, later)[:, 0]
            else:
                mu[:, first:end] = self._solve(span, own, later)
            end = first
        return mu, work

    def _solve(self, span: _Span, own: Tensor, later: Tensor) -> Tensor:
        """Return the adjoint states of a window, solved as a fixed point."""

        def f(mu: Tensor) -> Tensor:
            return span.sweep(torch.cat((mu[:, 1:], later[:, None]), dim=1), own, later)

        n = own.shape[1]
        stop = StopRule(self.max_iter or n + 1, self.tol, "rel")
        z0 = span.scan(torch.zeros_like(own), own, later)
        rule = make_solver(self.solver, {})
        solution: Tensor = solve(f, z0, rule, stop, on_failure=self.on_failure).z
        return solution


@dataclass
class Work:
    """The number of calls of the network.

    Args:
        rounds: calls one after the other, if those of one application of f run at once.
        evaluations: images that the network processed.
    """

    rounds: int = 0
    evaluations: int = 0

    def add(self, images: int) -> None:
        """Count one round with so many images."""
        self.rounds += 1
        self.evaluations += images

    def __iadd__(self, other: Work) -> Self:
        self.rounds += other.rounds
        self.evaluations += other.evaluations
        return self


class _Span:
    """Consecutive steps of a chain, linearised at their inputs."""

    def __init__(self, chain: ParallelChain, inputs: Tensor, first: int, work: Work) -> None:
        self.chain, self.work, self.first, self.n = chain, work, first, inputs.shape[1]
        self.x = inputs.flatten(0, 1).detach()
        self.rows = torch.arange(first, first + self.n).repeat(len(inputs))
        self._graph: tuple[Tensor, Tensor] | None = None

    def sweep(self, following: Tensor, own: Tensor, later: Tensor) -> Tensor:
        """Return adjoint states from the states that follow each of them."""
        return self.scan(self.products(following), own, later)

    def scan(self, products: Tensor, own: Tensor, later: Tensor) -> Tensor:
        """Return the adjoint states by the recursion from the last step to the first."""
        mu, states = later.to(precision(later)), []
        added = own.to(mu.dtype) + products
        a = self.chain.steps.a[self.first : self.first + self.n].tolist()
        for k in reversed(range(self.n)):
            mu = torch.add(added[:, k], mu, alpha=a[k])
            states.append(mu)
        return torch.stack(states[::-1], dim=1).to(own.dtype)

    def products(self, following: Tensor) -> Tensor:
        """Return each step's residual Jacobian, transposed, times the adjoint of the next state."""
        self.work.add(following.shape[0] * self.n)
        g, size = following.flatten(0, 1), self.chain.chunk
        if len(g) <= size:  # one graph fits into memory and serves every sweep
            x, r = self._graph = self._graph or self._linearised(slice(None))
            return _vjp(r, x, g).view_as(following)
        parts = []
        for start in range(0, len(g), size):
            part = slice(start, start + size)
            x, r = self._linearised(part)
            parts.append(_vjp(r, x, g[part]))
        return torch.cat(parts).view_as(following)

    @torch.enable_grad()
    def _linearised(self, part: slice) -> tuple[Tensor, Tensor]:
        x, rows = self.x[part].requires_grad_(), self.rows[part]
        m = self.chain.evaluate(x, self.chain.times(rows, x))
        return x, self.chain.residual(x, m, None, rows)


def _vjp(r: Tensor, x: Tensor, g: Tensor) -> Tensor:
    (product,) = torch.autograd.grad(r, x, g.to(r.dtype), retain_graph=True)
    return product


def attach(
    chain: ParallelChain, Z: Tensor, x: Tensor, noise: Tensor | None, adjoint: Adjoint, work: Work
) -> Tensor:
    """Return solved states with their gradient with respect to the initial noise and the noises."""
    attached: Tensor = _States.apply(Z, x, noise, chain, adjoint, work)  # type: ignore[no-untyped-call]
    return attached


class _States(torch.autograd.Function):
    """The identity on solved states, with the adjoint as its derivative."""

    @staticmethod
    def forward(
        ctx: Any,
        Z: Tensor,
        x: Tensor,
        noise: Tensor | None,
        chain: ParallelChain,
        adjoint: Adjoint,
        work: Work,
    ) -> Tensor:
        ctx.save_for_backward(Z, x)
        ctx.chain, ctx.adjoint, ctx.work = chain, adjoint, work
        return Z.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        Z, x = ctx.saved_tensors
        inputs = torch.cat((x[:, None], Z[:, :-1]), dim=1)
        h = torch.cat((torch.zeros_like(x)[:, None], g), dim=1)
        mu, work = ctx.adjoint.states(ctx.chain, inputs, h)
        ctx.work += work
        to_noise = None
        if ctx.needs_input_grad[2]:
            c = ctx.chain.steps.c.to(g.device, g.dtype)
            to_noise = c.view(1, -1, 1, 1, 1) * mu[:, 1:]
        return None, mu[:, 0], to_noise, None, None, None
