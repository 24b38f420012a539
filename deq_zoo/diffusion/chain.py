"""A sampling chain as one equilibrium: all its states at once are the fixed point."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deq_zoo.checks import check_at_least
from deq_zoo.diffusion.steps import Steps
from torchdeq.registry import suggest

Scope = Literal["trajectory", "timestep"]
SCOPES = ("trajectory", "timestep")
_BLOCK = 64  # steps whose residuals are in memory in float64 at once


class ParallelChain:
    r"""The states of a sampling chain as the fixed point of one function.

    From the initial noise $x$ a scheduler makes the states $z_1, \dots, z_T$ one after the other;
    the last of them is the image. With the residuals $r_k(z) = \mathrm{step}_k(z) - a_k z$ the same
    states solve

    $$f(Z)_{k+1} = a_k f(Z)_k + r_k(z_k), \qquad f(Z)_0 = z_0 = x$$

    where all calls of the network are one batch (Pokle et al., 2022; here for any step, clipped or
    not). The Jacobian of $f$ is strictly lower triangular: there is exactly one fixed point, and
    plain iteration reaches it after at most $T$ evaluations.

    Shapes: the initial noise `x` is `(B, C, H, W)`; states `Z` and the noises of the steps are
    `(B, T, C, H, W)`, row k of Z being $z_{k+1}$. The recursion is computed in float64, as its
    terms grow and cancel.

    Args:
        unet: called as `unet(x, t)` with a timestep for each image of `x`; it returns a tensor, or
            an object with the tensor as `.sample`. The chain neither changes nor trains it.
        scheduler: a DDIMScheduler or DDPMScheduler of diffusers.
        timesteps: how many, or which, in falling order.
        eta: noise of DDIM: 0 for none, 1 for as much as DDPM.
        scope: what a solver takes for a sample: `"trajectory"`, all states of an image, or
            `"timestep"`, each state on its own, as the authors' release does.
        chunk: the largest batch that the network gets; bounds the memory.
    """

    def __init__(
        self,
        unet: nn.Module,
        scheduler: Any,
        timesteps: int | Sequence[int] = 50,
        eta: float = 0.0,
        scope: Scope = "trajectory",
        *,
        chunk: int = 64,
    ) -> None:
        if scope not in SCOPES:
            raise ValueError(f"unknown scope {scope!r}{suggest(scope, SCOPES)}")
        check_at_least(1, chunk=chunk)
        self.unet, self.scope, self.chunk = unet, scope, chunk
        self.steps = Steps.of(scheduler, timesteps, eta)

    def __len__(self) -> int:
        return len(self.steps)

    def __call__(self, Z: Tensor, x: Tensor, noise: Tensor | None = None, first: int = 0) -> Tensor:
        """Apply f once.

        Args:
            Z: (B, n, C, H, W), states after the steps `first`, `first + 1`, ...
            x: the state before them.
            noise: of the whole chain.
            first: any run of steps is a chain of its own.
        """
        return self.apply(torch.cat((x[:, None], Z[:, :-1]), dim=1), x, noise, first)

    def apply(self, inputs: Tensor, x: Tensor, noise: Tensor | None, first: int = 0) -> Tensor:
        """Apply f once, with the inputs of the network given, one for each step."""
        m = self.outputs(inputs, first)
        state, blocks = x.to(precision(x)), []
        for rows in torch.arange(inputs.shape[1]).split(_BLOCK):
            part, states = slice(int(rows[0]), int(rows[-1]) + 1), []
            xi = None if noise is None else noise[:, first + rows].flatten(0, 1)
            r = self.residual(
                inputs[:, part].flatten(0, 1),
                m[:, part].flatten(0, 1),
                xi,
                (first + rows).repeat(len(x)),
            ).view(len(x), len(rows), *x.shape[1:])
            for a, step in zip(self.steps.a[first + rows].tolist(), r.unbind(1), strict=True):
                state = torch.add(step, state, alpha=a)
                states.append(state)
            blocks.append(torch.stack(states, dim=1).to(x.dtype))
        return torch.cat(blocks, dim=1)

    def outputs(self, inputs: Tensor, first: int = 0) -> Tensor:
        """Return the network's outputs for (B, n, C, H, W), computed in chunks.

        They have a graph if the inputs have one.
        """
        B, n = inputs.shape[:2]
        z = inputs.flatten(0, 1)
        t = self.times(torch.arange(first, first + n), z).repeat(B)
        if torch.is_grad_enabled() and z.requires_grad:
            parts = [
                checkpoint(self.evaluate, *part, use_reentrant=False) for part in self._parts(z, t)
            ]
        else:  # the weights are constants: nothing to differentiate
            with torch.no_grad():
                parts = [self.evaluate(*part) for part in self._parts(z, t)]
        return torch.cat(parts).view_as(inputs) if parts else torch.empty_like(inputs)

    def _parts(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        return zip(*(t.split(self.chunk) for t in tensors if len(t)), strict=True)

    def evaluate(self, z: Tensor, t: Tensor) -> Tensor:
        """Call the network once."""
        out = self.unet(z, t)
        m: Tensor = out if isinstance(out, Tensor) else out.sample
        if m.shape != z.shape:
            raise ValueError(
                "the network must return a tensor of the shape of its input, "
                f"{tuple(z.shape)}: got {tuple(m.shape)}"
            )
        return m

    def times(self, rows: Tensor, like: Tensor) -> Tensor:
        """Return the timesteps of some steps, on the device of `like`."""
        return self.steps.t[rows].to(like.device)

    def residual(self, z: Tensor, m: Tensor, noise: Tensor | None, rows: Tensor) -> Tensor:
        """Return `step(z) - a z` for (N, C, H, W) states; `rows` are their steps, one or N."""

        def of(coefficients: Tensor) -> Tensor:
            return coefficients[rows].to(z.device, kind).view(-1, 1, 1, 1)

        s, kind = self.steps, precision(z)
        m = m.to(kind)
        r = of(s.b) * m
        if noise is not None:
            r = r + of(s.c) * noise.to(kind)
        if s.clip is not None:
            image = of(s.p) * z.to(kind) + of(s.q) * m
            r = r + of(s.A) * (s.clip(image) - image)
        return r

    def step(self, z: Tensor, k: int, noise: Tensor | None = None) -> Tensor:
        """Return (B, C, H, W) states after step k, as the scheduler computes it."""
        t = self.times(torch.tensor([k]), z).expand(len(z))
        xi = None if noise is None else noise[:, k]
        r = self.residual(z, self.evaluate(z, t), xi, torch.tensor([k]))
        return (float(self.steps.a[k]) * z.to(r.dtype) + r).to(z.dtype)

    def sequential(
        self,
        x: Tensor,
        noise: Tensor | None = None,
        each: Callable[[int, Tensor], object] | None = None,
    ) -> Tensor:
        """Return the images of the chain, computed step by step; differentiable if `x` is.

        Args:
            x: the initial noise.
            noise: of the whole chain.
            each: called with the number and the state of every step.
        """
        self.check(x, noise)
        z = x
        graph = torch.is_grad_enabled() and (
            x.requires_grad or (noise is not None and noise.requires_grad)
        )
        with torch.set_grad_enabled(graph):
            for k in range(len(self)):
                z = self.step(z, k, noise)
                if each is not None:
                    each(k, z)
        return z

    def states(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return all states of the chain, computed step by step: (B, T, C, H, W)."""
        states: list[Tensor] = []
        self.sequential(x, noise, lambda k, z: states.append(z))
        return torch.stack(states, dim=1)

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Return noise from which the deterministic chain leads close to images: DDIM backwards.

        Step k is undone with the network's output at its end instead of its start; an image counts
        as a state at the last timestep.
        """
        self.check(images, None, noisy=False)
        s, z = self.steps, images
        for k in reversed(range(1, len(s))):
            t = self.times(torch.tensor([k]), z).expand(len(z))
            m, wide = self.evaluate(z, t).to(precision(z)), z.to(precision(z))
            image = float(s.p[k]) * wide + float(s.q[k]) * m
            eps = (wide - float(s.ab[k].sqrt()) * image) / float((1 - s.ab[k]).sqrt())
            to = s.ab[k - 1]
            z = (float(to.sqrt()) * image + float((1 - to).sqrt()) * eps).to(z.dtype)
        return z

    def check(self, x: Tensor, noise: Tensor | None, noisy: bool = True) -> None:
        """Raise unless the noises fit the chain and the network is in evaluation mode."""
        if x.dim() != 4 or not x.is_floating_point():
            raise ValueError(
                f"initial noise must be (B, C, H, W) floats, got {tuple(x.shape)} {x.dtype}"
            )
        if noisy and self.steps.stochastic and noise is None:
            raise ValueError(
                "this chain adds noise at each step: give noise (B, T, C, H, W), e.g. "
                "chain.noise(x, generator)"
            )
        if noise is not None and not self.steps.stochastic:
            raise ValueError("this chain adds no noise (eta is 0): drop noise")
        want = (len(x), len(self), *x.shape[1:])
        if noise is not None and tuple(noise.shape) != want:
            raise ValueError(f"noise must be (B, T, C, H, W) = {want}, got {tuple(noise.shape)}")
        for name, module in self.unet.named_modules():
            if module.training:
                raise ValueError(
                    f"{name or 'the network'} is in training mode, where two evaluations may "
                    "differ: call unet.eval() first"
                )

    def noise(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor | None:
        """Return unit noises for the steps, drawn on the generator's device; None without noise."""
        if not self.steps.stochastic:
            return None
        shape = (len(x), len(self), *x.shape[1:])
        where = x.device if generator is None else generator.device
        return torch.randn(shape, generator=generator, device=where, dtype=x.dtype).to(x.device)


def precision(like: Tensor) -> torch.dtype:
    """Return the dtype of recursions: float64 where the device has it."""
    return torch.float32 if like.device.type == "mps" else torch.float64
