"""The exact gradient of a chain's states: its adjoint, solved in parallel or step by step."""

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
    r"""How the adjoint states $\mu_k = d\ell / d z_k$ are found.

    $$\mu_k = h_k + a_k \mu_{k+1} + (\partial r_k / \partial z_k)^\top \mu_{k+1},
    \qquad \mu_T = h_T$$

    with $h_k$ the loss's own gradient at each state. It is the chain in reverse, and again a
    triangular fixed point: the products of all steps in a window are one batch.

    Args:
        window: steps solved at once, from the last to the first; 1 is the reverse sweep, a product
            for each step and none in vain; 0 is all of them.
        solver: of a window of several steps, by its registered name.
        tol: relative residual of each image.
        max_iter: products in a window; 0 allows as many as it has steps, after which plain
            iteration is exact.
    """

    window: int = 1
    solver: str = "anderson"
    tol: float = 1e-6
    max_iter: int = 0

    def __post_init__(self) -> None:
        check_fields(self, 0, "window", "max_iter")

    def states(self, chain: ParallelChain, inputs: Tensor, h: Tensor) -> tuple[Tensor, Work]:
        """The adjoint of every state, initial noise first: (B, T + 1, C, H, W).

        Args:
            chain: the chain.
            inputs: (B, T, C, H, W), what the network gets at each step.
            h: (B, T + 1, C, H, W), the loss's own gradient at each state.
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
        """The adjoint states of a window, as a fixed point."""

        def f(mu: Tensor) -> Tensor:
            return span.sweep(torch.cat((mu[:, 1:], later[:, None]), dim=1), own, later)

        n = own.shape[1]
        stop = StopRule(self.max_iter or n + 1, self.tol, "rel")
        start = span.scan(torch.zeros_like(own), own, later)
        found: Tensor = solve(f, start, make_solver(self.solver, {}), stop).z
        return found


@dataclass
class Work:
    """What was asked of the network.

    Args:
        rounds: calls one after the other, if those of a round run at once.
        evaluations: images seen by the network.
    """

    rounds: int = 0
    evaluations: int = 0

    def add(self, images: int) -> None:
        """Count one round that shows the network so many images."""
        self.rounds += 1
        self.evaluations += images

    def __iadd__(self, other: Work) -> Self:
        self.rounds += other.rounds
        self.evaluations += other.evaluations
        return self


class _Span:
    """Some consecutive steps, linearised at their inputs."""

    def __init__(self, chain: ParallelChain, inputs: Tensor, first: int, work: Work) -> None:
        self.chain, self.work, self.first, self.n = chain, work, first, inputs.shape[1]
        self.x = inputs.flatten(0, 1).detach()
        self.rows = torch.arange(first, first + self.n).repeat(len(inputs))
        self._kept: tuple[Tensor, Tensor] | None = None

    def sweep(self, following: Tensor, own: Tensor, later: Tensor) -> Tensor:
        """Adjoint states from those that follow each of them."""
        return self.scan(self.products(following), own, later)

    def scan(self, products: Tensor, own: Tensor, later: Tensor) -> Tensor:
        """The recursion from the last step to the first."""
        mu, made = later.to(precision(later)), []
        added = own.to(mu.dtype) + products
        a = self.chain.steps.a[self.first : self.first + self.n].tolist()
        for k in reversed(range(self.n)):
            mu = torch.add(added[:, k], mu, alpha=a[k])
            made.append(mu)
        return torch.stack(made[::-1], dim=1).to(own.dtype)

    def products(self, following: Tensor) -> Tensor:
        """Each step's residual, differentiated, times the adjoint of what it made."""
        self.work.add(following.shape[0] * self.n)
        g, size = following.flatten(0, 1), self.chain.chunk
        if len(g) <= size:  # one graph fits, and serves every sweep
            x, r = self._kept = self._kept or self._linearised(slice(None))
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
    chain: ParallelChain, Z: Tensor, z0: Tensor, noise: Tensor | None, adjoint: Adjoint, work: Work
) -> Tensor:
    """Solved states with their gradient with respect to the initial noise and the others."""
    attached: Tensor = _States.apply(Z, z0, noise, chain, adjoint, work)  # type: ignore[no-untyped-call]
    return attached


class _States(torch.autograd.Function):
    """The identity on solved states, with the adjoint as its derivative."""

    @staticmethod
    def forward(
        ctx: Any,
        Z: Tensor,
        z0: Tensor,
        noise: Tensor | None,
        chain: ParallelChain,
        adjoint: Adjoint,
        work: Work,
    ) -> Tensor:
        ctx.save_for_backward(Z, z0)
        ctx.chain, ctx.adjoint, ctx.work = chain, adjoint, work
        return Z.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        Z, z0 = ctx.saved_tensors
        inputs = torch.cat((z0[:, None], Z[:, :-1]), dim=1)
        h = torch.cat((torch.zeros_like(z0)[:, None], g), dim=1)
        mu, work = ctx.adjoint.states(ctx.chain, inputs, h)
        ctx.work += work
        to_noise = None
        if ctx.needs_input_grad[2]:
            c = ctx.chain.steps.c.to(g.device, g.dtype)
            to_noise = c.view(1, -1, 1, 1, 1) * mu[:, 1:]
        return None, mu[:, 0], to_noise, None, None, None
