"""Inversion: the initial noise from which a chain leads to given images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor

from deq_zoo.checks import check_at_least
from deq_zoo.diffusion.adjoint import Adjoint, Work
from deq_zoo.diffusion.chain import ParallelChain
from deq_zoo.diffusion.sampling import parallel_sample
from torchdeq import Phantom, StopRule, fixed_point
from torchdeq.registry import suggest
from torchdeq.solver import Solver, make_solver

Method = Literal["implicit", "phantom", "sequential"]
METHODS = ("implicit", "phantom", "sequential")


@dataclass(frozen=True)
class Inversion:
    """The best initial noise of each image, with its own error.

    Args:
        noise: (B, C, H, W), the initial noise.
        images: (B, C, H, W), the images that the chain makes of the noise.
        sse: (B,) squared error summed over channels and pixels, of values in [-1, 1]; the paper
            calls it MSE.
        history: (steps, B), `sse` before each step of the optimiser.
        seconds: of wall time.
        work: rounds and evaluations of the network, forward and backward.
    """

    noise: Tensor
    images: Tensor
    sse: Tensor
    history: Tensor
    seconds: float
    work: Work

    @property
    def mse(self) -> Tensor:
        """Return (B,) mean squared errors, of values in [-1, 1]."""
        return self.sse / max(1, self.images[0].numel() if len(self.images) else 1)

    @property
    def psnr(self) -> Tensor:
        """Return (B,) peak signal-to-noise ratios in dB, for the range of 2 of [-1, 1]."""
        return 10 * torch.log10(4 / self.mse)


def invert(
    chain: ParallelChain,
    images: Tensor,
    *,
    method: Method = "implicit",
    steps: int = 50,
    lr: float = 0.005,
    x: Tensor | None = None,
    noise: Tensor | None = None,
    solver: str | Solver[Any] = "anderson",
    stop: StopRule | None = None,
    adjoint: Adjoint | None = None,
    phantom: Phantom | None = None,
    z0: Tensor | None = None,
    keep_states: bool = True,
    enough: float = 0.0,
    on_failure: str = "ignore",
    each: Callable[[int, Tensor], object] | None = None,
) -> Inversion:
    """Search initial noise for images by Adam on the squared error of the chain's images.

    Images are independent of each other, and each keeps the noise with the smallest error.

    Args:
        chain: the chain.
        images: (B, C, H, W), in [-1, 1].
        method: `"implicit"`, the exact gradient through the equilibrium; `"phantom"`, the
            paper's gradient of a few damped steps; `"sequential"`, backpropagation through the
            chain step by step, with memory that grows with its length.
        steps: of Adam.
        lr: the learning rate of Adam.
        x: initial noise to begin with; by default the images encoded by the reversed chain.
        noise: of every step, (B, T, C, H, W), for a stochastic chain.
        solver: of the forward solve.
        stop: budget and tolerance of the forward solve.
        adjoint: the solver of the exact gradient.
        phantom: steps and damping of the phantom gradient.
        z0: states of the chain from which the first solve starts, (B, T, C, H, W); copies of the
            noise by default.
        keep_states: whether each solve starts from the states of the solve before it; else all
            start as the first one.
        enough: summed squared error at which an image is finished; the search ends when all are.
        on_failure: how to report forward solves that did not converge; not used by "sequential".
        each: called with every step's number and errors; returning True ends the search.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}{suggest(method, METHODS)}")
    check_at_least(1, steps=steps)
    _check_tensors(chain, images, x, z0)
    began, work = perf_counter(), Work()
    if x is None:
        x = chain.encode(images)
        work += Work(len(chain) - 1, (len(chain) - 1) * len(images))
    rule = make_solver(solver, {}) if isinstance(solver, str) else solver
    stop = StopRule(15, 1e-3, "rel") if stop is None else stop
    forward = _Forward(
        chain, method, rule, stop, adjoint, phantom or Phantom(tau=0.1), keep_states, on_failure
    )
    forward.states = z0
    best = _Best(x.detach().clone(), torch.zeros_like(images), _infinite(images))
    history = []
    for k, (x_k, image, sse, used) in enumerate(_descend(forward, x, noise, images, steps, lr)):
        work += used
        history.append(sse)
        best.update(x_k, image, sse)
        ended = each is not None and each(k, sse) is True
        if ended or bool((best.sse <= enough).all()):
            break
    seconds = perf_counter() - began
    return Inversion(best.noise, best.image, best.sse, torch.stack(history), seconds, work)


def _check_tensors(
    chain: ParallelChain, images: Tensor, x: Tensor | None, z0: Tensor | None
) -> None:
    if not bool(images.isfinite().all()):
        raise ValueError("images must be finite, in [-1, 1]: some values are NaN or infinite")
    want = (len(images), len(chain), *images.shape[1:])
    if z0 is not None and tuple(z0.shape) != want:
        raise ValueError(f"z0 must be (B, T, C, H, W) = {want}, got {tuple(z0.shape)}")
    if x is not None and x.shape != images.shape:
        raise ValueError(
            f"x must have the shape of images, {tuple(images.shape)}, got {tuple(x.shape)}"
        )


def _descend(
    forward: _Forward, x: Tensor, noise: Tensor | None, images: Tensor, steps: int, lr: float
) -> Iterator[tuple[Tensor, Tensor, Tensor, Work]]:
    """Yield noise, image, summed squared error and work before each step of Adam."""
    x = x.detach().clone().requires_grad_()
    optimizer = torch.optim.Adam([x], lr=lr)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        with torch.enable_grad():
            image, used = forward(x, noise)
            sse = (image - images).square().flatten(1).sum(1)
            torch.autograd.backward(sse.sum(), inputs=[x])
        yield x.detach(), image.detach(), sse.detach(), used
        optimizer.step()


class _Forward:
    """The map from noise to image, with its gradient by one of the methods."""

    def __init__(
        self,
        chain: ParallelChain,
        method: str,
        rule: Solver[Any],
        stop: StopRule,
        adjoint: Adjoint | None,
        phantom: Phantom,
        keep_states: bool,
        on_failure: str,
    ) -> None:
        self.chain, self.rule, self.stop, self.adjoint = chain, rule, stop, adjoint
        self.phantom, self.keep_states, self.on_failure = phantom, keep_states, on_failure
        self.image = {"implicit": self._implicit, "phantom": self._phantom}.get(
            method, self._sequential
        )
        self.states: Tensor | None = None

    def __call__(self, x: Tensor, noise: Tensor | None) -> tuple[Tensor, Work]:
        return self.image(x, noise)

    def _implicit(self, x: Tensor, noise: Tensor | None) -> tuple[Tensor, Work]:
        trajectory = parallel_sample(
            self.chain, x, noise, solver=self.rule, stop=self.stop, z0=self.states,
            adjoint=self.adjoint, on_failure=self.on_failure,
        )  # fmt: skip
        self._keep(trajectory.states)
        return trajectory.image, trajectory.work

    def _phantom(self, x: Tensor, noise: Tensor | None) -> tuple[Tensor, Work]:
        chain, work = self.chain, Work()
        chain.check(x, noise)
        shape = (len(x), len(chain), *x.shape[1:])
        z0 = x.detach()[:, None].expand(shape) if self.states is None else self.states
        single = chain.scope == "timestep"

        def f(Z: Tensor) -> Tensor:
            work.add(shape[0] * shape[1])
            Z = Z.view(shape)
            # As released: the network sees the noise as a constant.
            fZ = chain.apply(torch.cat((x.detach()[:, None], Z[:, :-1]), dim=1), x, noise)
            return fZ.flatten(0, 1) if single else fZ

        solution = fixed_point(
            f, z0.flatten(0, 1) if single else z0, solver=self.rule, stop=self.stop,
            backward=self.phantom, on_failure=self.on_failure,
        ).z  # fmt: skip
        assert isinstance(solution, Tensor)
        Z = solution.view(shape)
        self._keep(Z)
        return Z[:, -1], work

    def _sequential(self, x: Tensor, noise: Tensor | None) -> tuple[Tensor, Work]:
        T, n = len(self.chain), len(x)
        # Forward, and once more backward.
        return self.chain.sequential(x, noise), Work(2 * T, 2 * T * n)

    def _keep(self, states: Tensor) -> None:
        if self.keep_states:
            self.states = states.detach()


@dataclass
class _Best:
    """The noise with the smallest error of each image so far."""

    noise: Tensor
    image: Tensor
    sse: Tensor

    def update(self, noise: Tensor, image: Tensor, sse: Tensor) -> None:
        better = sse < self.sse
        rows = better.view(-1, 1, 1, 1)
        self.noise = torch.where(rows, noise, self.noise)
        self.image = torch.where(rows, image, self.image)
        self.sse = torch.where(better, sse, self.sse)


def _infinite(images: Tensor) -> Tensor:
    return images.new_full((len(images),), torch.inf)


def interpolate(a: Tensor, b: Tensor, n: int) -> Tensor:
    """Return (n, ..., C, H, W) noises between two, on the arc on which all have the usual norm.

    Args:
        a: the first noise, (..., C, H, W).
        b: the last noise.
        n: the number of noises, both ends included.
    """
    check_at_least(2, n=n)  # both ends are among the noises
    if a.shape != b.shape or a.dim() < 3:
        raise ValueError(
            f"both noises must be (..., C, H, W), got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    lengths = [t.flatten(-3).norm(dim=-1, keepdim=True) for t in (a, b)]
    if any(bool((length == 0).any()) for length in lengths):
        raise ValueError("a noise that is zero everywhere has no direction")
    u, v = (t.flatten(-3) / length for t, length in zip((a, b), lengths, strict=True))
    angle = (u * v).sum(-1).clamp(-1, 1).acos()[..., None, None, None]
    weight = torch.linspace(0, 1, n, dtype=a.dtype, device=a.device)
    weight = weight.view(-1, *(1,) * a.dim())
    straight = a + weight * (b - a)
    sine = angle.sin()
    arc = (((1 - weight) * angle).sin() * a + (weight * angle).sin() * b) / sine
    return torch.where(sine.abs() < 1e-4, straight, arc)
