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
    """What was found for each image: the best noise seen, with its own error.

    Args:
        noise: (B, C, H, W), the initial noise.
        images: what the chain made of it.
        sse: (B,) squared error summed over channels and pixels, of values in [-1, 1]; the paper
            calls it MSE.
        history: (steps, B), the same before each step of the optimiser.
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
        """(B,) mean squared error."""
        return self.sse / max(1, self.images[0].numel() if len(self.images) else 1)

    @property
    def psnr(self) -> Tensor:
        """(B,) in dB, for a range of 2."""
        return 10 * torch.log10(4 / self.mse)


def invert(
    chain: ParallelChain,
    images: Tensor,
    *,
    method: Method = "implicit",
    steps: int = 50,
    lr: float = 0.005,
    start: Tensor | None = None,
    noise: Tensor | None = None,
    solver: str | Solver[Any] = "anderson",
    stop: StopRule | None = None,
    adjoint: Adjoint | None = None,
    phantom: Phantom | None = None,
    states: Tensor | None = None,
    warm: bool = True,
    enough: float = 0.0,
    each: Callable[[int, Tensor], object] | None = None,
) -> Inversion:
    """Find initial noise for images by Adam on the squared error of what the chain makes of it.

    Images are independent of each other, and each keeps the best noise it has met.

    Args:
        chain: the chain.
        images: (B, C, H, W), in [-1, 1].
        method: `"implicit"`, the exact gradient through the equilibrium; `"phantom"`, the
            paper's gradient of a few damped steps; `"sequential"`, through the chain step by
            step, with the memory that takes.
        steps: of Adam.
        lr: its rate.
        start: noise to begin with; by default the images encoded by the reversed chain.
        noise: of every step, (B, T, C, H, W), for a stochastic chain.
        solver: of the forward solve.
        stop: its budget and tolerance.
        adjoint: how the exact gradient is found.
        phantom: steps and damping of the phantom gradient.
        states: of the chain, (B, T, C, H, W), for the first solve to start from; copies of the
            noise by default.
        warm: whether each solve starts from the states of the one before; else as the first.
        enough: summed squared error with which an image is done; all of them end the search.
        each: called with every step's number and errors; returning True ends the search.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}{suggest(method, METHODS)}")
    check_at_least(1, steps=steps)
    _check_tensors(chain, images, start, states)
    began, work = perf_counter(), Work()
    if start is None:
        start = chain.encode(images)
        work += Work(len(chain) - 1, (len(chain) - 1) * len(images))
    rule = make_solver(solver, {}) if isinstance(solver, str) else solver
    stop = StopRule(15, 1e-3, "rel") if stop is None else stop
    forward = _Forward(chain, method, rule, stop, adjoint, phantom or Phantom(tau=0.1), warm)
    forward.states = states
    best = _Best(start.detach().clone(), torch.zeros_like(images), _infinite(images))
    history = []
    for k, (z, image, sse, used) in enumerate(_descend(forward, start, noise, images, steps, lr)):
        work += used
        history.append(sse)
        best.update(z, image, sse)
        ended = each is not None and each(k, sse) is True
        if ended or bool((best.sse <= enough).all()):
            break
    seconds = perf_counter() - began
    return Inversion(best.noise, best.image, best.sse, torch.stack(history), seconds, work)


def _check_tensors(
    chain: ParallelChain, images: Tensor, start: Tensor | None, states: Tensor | None
) -> None:
    if not bool(images.isfinite().all()):
        raise ValueError("images must be finite, in [-1, 1]: some values are NaN or infinite")
    want = (len(images), len(chain), *images.shape[1:])
    if states is not None and tuple(states.shape) != want:
        raise ValueError(f"states must be (B, T, C, H, W) = {want}, got {tuple(states.shape)}")
    if start is not None and start.shape != images.shape:
        raise ValueError(f"start must be shaped like images, got {tuple(start.shape)}")


def _descend(
    forward: _Forward, start: Tensor, noise: Tensor | None, images: Tensor, steps: int, lr: float
) -> Iterator[tuple[Tensor, Tensor, Tensor, Work]]:
    """Yield noise, image, summed squared error and work before each step of Adam."""
    z = start.detach().clone().requires_grad_()
    optimizer = torch.optim.Adam([z], lr=lr)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        with torch.enable_grad():
            image, used = forward(z, noise)
            sse = (image - images).square().flatten(1).sum(1)
            torch.autograd.backward(sse.sum(), inputs=[z])
        yield z.detach(), image.detach(), sse.detach(), used
        optimizer.step()


class _Forward:
    """The image of a noise with its gradient by one of the methods; keeps states to start from."""

    def __init__(
        self,
        chain: ParallelChain,
        method: str,
        rule: Solver[Any],
        stop: StopRule,
        adjoint: Adjoint | None,
        phantom: Phantom,
        warm: bool,
    ) -> None:
        self.chain, self.rule, self.stop, self.adjoint = chain, rule, stop, adjoint
        self.phantom, self.warm = phantom, warm
        self.image = {"implicit": self._implicit, "phantom": self._phantom}.get(
            method, self._sequential
        )
        self.states: Tensor | None = None

    def __call__(self, z: Tensor, noise: Tensor | None) -> tuple[Tensor, Work]:
        return self.image(z, noise)

    def _implicit(self, z: Tensor, noise: Tensor | None) -> tuple[Tensor, Work]:
        found = parallel_sample(
            self.chain, z, noise, solver=self.rule, stop=self.stop, start=self.states,
            adjoint=self.adjoint, on_failure="ignore",
        )  # fmt: skip
        self._keep(found.states)
        return found.image, found.work

    def _phantom(self, z: Tensor, noise: Tensor | None) -> tuple[Tensor, Work]:
        chain, work = self.chain, Work()
        chain.check(z, noise)
        shape = (len(z), len(chain), *z.shape[1:])
        start = z.detach()[:, None].expand(shape) if self.states is None else self.states
        single = chain.scope == "timestep"

        def f(Z: Tensor) -> Tensor:
            work.add(shape[0] * shape[1])
            Z = Z.view(shape)
            # As released: the network sees the noise as a constant.
            fZ = chain.apply(torch.cat((z.detach()[:, None], Z[:, :-1]), dim=1), z, noise)
            return fZ.flatten(0, 1) if single else fZ

        found = fixed_point(
            f, start.flatten(0, 1) if single else start, solver=self.rule, stop=self.stop,
            backward=self.phantom, on_failure="ignore",
        ).z  # fmt: skip
        assert isinstance(found, Tensor)
        Z = found.view(shape)
        self._keep(Z)
        return Z[:, -1], work

    def _sequential(self, z: Tensor, noise: Tensor | None) -> tuple[Tensor, Work]:
        T, n = len(self.chain), len(z)
        # Forward, and once more backward.
        return self.chain.sequential(z, noise), Work(2 * T, 2 * T * n)

    def _keep(self, states: Tensor) -> None:
        if self.warm:
            self.states = states.detach()


@dataclass
class _Best:
    """The best of each image so far."""

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
    """Noises between two, along the arc on which all have their usual length: (n, ..., C, H, W).

    Args:
        a: the first of them, (..., C, H, W).
        b: the last.
        n: how many, both ends included.
    """
    check_at_least(2, n=n)  # both ends are among the noises
    if a.shape != b.shape or a.dim() < 3:
        raise ValueError(
            f"both noises must be (..., C, H, W), got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    lengths = [t.flatten(-3).norm(dim=-1, keepdim=True) for t in (a, b)]
    if any(bool((length == 0).any()) for length in lengths):
        raise ValueError("a noise that is zero everywhere has no direction to start from")
    u, v = (t.flatten(-3) / length for t, length in zip((a, b), lengths, strict=True))
    angle = (u * v).sum(-1).clamp(-1, 1).acos()[..., None, None, None]
    share = torch.linspace(0, 1, n, dtype=a.dtype, device=a.device)
    share = share.view(-1, *(1,) * a.dim())
    straight = a + share * (b - a)
    sine = angle.sin()
    arc = (((1 - share) * angle).sin() * a + (share * angle).sin() * b) / sine
    return torch.where(sine.abs() < 1e-4, straight, arc)
