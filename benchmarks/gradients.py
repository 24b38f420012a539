"""Requests about the gradients of a contestant; they run in its process."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from benchmarks import spectra
from benchmarks.cases import CASES, Case, residual
from benchmarks.gauge import held_bytes, peak_bytes, seconds
from benchmarks.probe import Ask, Probe, worst

Reply = dict[str, Any]
problem = cache(spectra.problem)


@cache
def trainable(name: str) -> Case:
    """Return a case whose weights receive gradients."""
    case = CASES[name]()
    for W in case.weights:
        W.requires_grad_()
    return case


@cache
def cotangent(name: str) -> Tensor:
    """Return the cotangent of a loss that is a random linear function, averaged over the state."""
    z0 = CASES[name]().z0
    c = torch.randn(z0.shape, generator=torch.Generator().manual_seed(1))
    return c / c.numel()


class GradientBench:
    """The requests of the benchmarks of gradients."""

    def __init__(self, contestant: Any) -> None:
        self.contestant = contestant

    def adjoints(self) -> Reply:
        """Return the names of the solvers for adjoint systems."""
        return {"adjoints": list(self.contestant.ADJOINTS)}

    @torch.enable_grad()
    def adjoint(
        self, spectrum: str, radius: float, solver: str, products: int, tol: float
    ) -> Reply:
        """Solve one adjoint system; return the products, counted, and the residual in float64."""
        W, x, J, g = problem(spectrum, radius)
        if solver == "shine":  # needs a forward solve to learn from
            W, x = W.float(), x.float()
            f = Probe(lambda z: torch.tanh(z @ W.mT + x), x)
            ask = Ask("broyden", 400, 1e-5, "shine", products, tol)
        else:
            f = Probe(lambda z: torch.bmm(J, z.unsqueeze(2)).squeeze(2), x.float())
            ask = Ask("fixed_point_iter", 1, 0.0, solver, products, tol)
        u = f.adjoint(self.contestant.differentiable(f, torch.zeros_like(f.e), ask), g)
        if solver == "shine":
            slope = 1 - torch.tanh(f.point.detach().double() @ W.double().mT + x).square()
            J = slope[:, :, None] * W.double()
        return {
            "products": f.products,
            "residual": worst(_transposed(J, u) + g - u.double(), g.double()),
        }

    @torch.enable_grad()
    def phantom(self, spectrum: str, radius: float, steps: int) -> Reply:
        """Return the lowest cosine, over the batch, of a phantom gradient with the exact one."""
        _, x, J, g = problem(spectrum, radius)
        f = Probe(lambda z: torch.bmm(J, z.unsqueeze(2)).squeeze(2), x.float())
        u = f.adjoint(self.contestant.phantom(f, torch.zeros_like(f.e), steps), g)
        A = torch.eye(len(J[0])) - J.double()
        exact = torch.linalg.solve(A.mT, g.double().unsqueeze(2)).squeeze(2)
        return {"cosine": float(cosine_similarity(u.double(), exact, dim=1).min())}

    @torch.enable_grad()
    def count_pass(self, case: str, method: str) -> Reply:
        """Count the calls of `f` and its backward in both passes, and the bytes that they take."""
        problem, differentiable = trainable(case), self.contestant.METHODS[method]
        f = Probe(problem.f, problem.z0)
        torch.autograd.grad(differentiable(f, problem.z0), problem.weights, cotangent(case))
        given = (*problem.weights, problem.z0)
        return {
            "calls": f.calls,
            "products": f.products,
            "held": held_bytes(lambda: differentiable(problem.f, problem.z0), given),
            "peak": peak_bytes(lambda: self.backpropagate(case, method)),
        }

    def time_pass(self, case: str, method: str, least: float) -> Reply:
        """Return the seconds of a forward and backward pass."""
        return {"seconds": seconds(lambda: self.backpropagate(case, method), least)}

    @torch.enable_grad()
    def check_step(self, case: str, **ask: Any) -> Reply:
        """Count calls and products of a training step; return the residuals of both solves, too."""
        problem, g = trainable(case), cotangent(case)
        f = Probe(problem.f, problem.z0)
        z = self.contestant.differentiable(f, problem.z0, _for_cotangent(g, **ask))
        u = f.adjoint(z, g)
        counted = {"calls": f.calls, "products": f.products}
        with torch.no_grad():
            forward = residual(problem, z)
        return {**counted, "forward": forward, "backward": f.residual(u, g)}

    def time_step(self, case: str, least: float, **ask: Any) -> Reply:
        """Return the seconds of a training step: both passes, without the optimizer."""
        wanted = _for_cotangent(cotangent(case), **ask)
        return {"seconds": seconds(lambda: self.step(case, wanted), least)}

    @torch.enable_grad()
    def step(self, case: str, ask: Ask) -> tuple[Tensor, ...]:
        """Return the gradients of the weights."""
        problem = trainable(case)
        z = self.contestant.differentiable(problem.f, problem.z0, ask)
        return torch.autograd.grad(z, problem.weights, cotangent(case))

    @torch.enable_grad()
    def backpropagate(self, case: str, method: str) -> tuple[Tensor, ...]:
        problem = trainable(case)
        z = self.contestant.METHODS[method](problem.f, problem.z0)
        return torch.autograd.grad(z, problem.weights, cotangent(case))


def _transposed(J: Tensor, u: Tensor) -> Tensor:
    """Return dense products, in float64."""
    return torch.einsum("bij,bi->bj", J.double(), u.double())


def _for_cotangent(g: Tensor, **ask: Any) -> Ask:
    return Ask(**ask, size=float(torch.linalg.vector_norm(g.flatten(1), dim=1).min()))
