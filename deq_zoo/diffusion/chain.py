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
_BLOCK = 64  # steps whose residuals are held in float64 at once


class ParallelChain:
    r"""The states of a sampling chain as the fixed point of one function.

    From the initial noise $z_0$ a scheduler makes $z_1, \dots, z_T$, the last of them
    the image, one after the other. With the residuals $r_k(z) = \mathrm{step}_k(z) - a_k z$
    the same states solve

    $$f(Z)_{k+1} = a_k f(Z)_k + r_k(z_k), \qquad f(Z)_0 = z_0$$

    where all calls of the network are one batch (Pokle et al., 2022; here for any step, clipped or
    not). The Jacobian of $f$ is strictly lower triangular: there is exactly one fixed point,
    and plain iteration has found it after $T$ evaluations.

    Shapes: `z0` is `(B, C, H, W)`; states `Z` and noises are `(B, T, C, H, W)`, row k of Z
    being $z_{k+1}$. The recursion is computed in float64, as its terms grow and cancel.

    Args:
        unet: called as `unet(x, t)` with a timestep for each image of `x`; what it returns is
            the output or has it as `.sample`. It stays as it is, and gets no gradient.
        scheduler: a DDIMScheduler or DDPMScheduler of diffusers.
        timesteps: how many, or which, in falling order.
        eta: noise of DDIM: 0 for none, 1 for as much as DDPM.
        scope: what a solver takes for a sample: `"trajectory"`, all states of an image, or
            `"timestep"`, each state on its own, as the authors' release does.
        chunk: the largest batch the network gets; bounds the memory.
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

    def __call__(
        self, Z: Tensor, z0: Tensor, noise: Tensor | None = None, first: int = 0
    ) -> Tensor:
        """One application of f.

        Args:
            Z: (B, n, C, H, W), states after the steps `first`, `first + 1`, ...
            z0: the state before them.
            noise: of the whole chain.
            first: any run of steps is a chain of its own.
        """
        return self.apply(torch.cat((z0[:, None], Z[:, :-1]), dim=1), z0, noise, first)

    def apply(self, inputs: Tensor, z0: Tensor, noise: Tensor | None, first: int = 0) -> Tensor:
        """The same with the network's inputs given, one for each step."""
        m = self.outputs(inputs, first)
        state, blocks = z0.to(precision(z0)), []
        for rows in torch.arange(inputs.shape[1]).split(_BLOCK):
            part, made = slice(int(rows[0]), int(rows[-1]) + 1), []
            xi = None if noise is None else noise[:, first + rows].flatten(0, 1)
            r = self.residual(
                inputs[:, part].flatten(0, 1),
                m[:, part].flatten(0, 1),
                xi,
                (first + rows).repeat(len(z0)),
            ).view(len(z0), len(rows), *z0.shape[1:])
            for a, step in zip(self.steps.a[first + rows].tolist(), r.unbind(1), strict=True):
                state = torch.add(step, state, alpha=a)
                made.append(state)
            blocks.append(torch.stack(made, dim=1).to(z0.dtype))
        return torch.cat(blocks, dim=1)

    def outputs(self, inputs: Tensor, first: int = 0) -> Tensor:
        """What the network says of (B, n, C, H, W), in chunks; with a graph if they have one."""
        B, n = inputs.shape[:2]
        x = inputs.flatten(0, 1)
        t = self.times(torch.arange(first, first + n), x).repeat(B)
        if torch.is_grad_enabled() and x.requires_grad:
            parts = [
                checkpoint(self.evaluate, *part, use_reentrant=False) for part in self._parts(x, t)
            ]
        else:  # the weights are constants: nothing to differentiate
            with torch.no_grad():
                parts = [self.evaluate(*part) for part in self._parts(x, t)]
        return torch.cat(parts).view_as(inputs) if parts else torch.empty_like(inputs)

    def _parts(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        return zip(*(t.split(self.chunk) for t in tensors if len(t)), strict=True)

    def evaluate(self, x: Tensor, t: Tensor) -> Tensor:
        """One call of the network."""
        out = self.unet(x, t)
        m: Tensor = out if isinstance(out, Tensor) else out.sample
        if m.shape != x.shape:
            raise ValueError(
                f"the network must return what it gets, {tuple(x.shape)}: got {tuple(m.shape)}"
            )
        return m

    def times(self, rows: Tensor, like: Tensor) -> Tensor:
        """The timesteps of some steps, on a device."""
        return self.steps.t[rows].to(like.device)

    def residual(self, z: Tensor, m: Tensor, noise: Tensor | None, rows: Tensor) -> Tensor:
        """`step(z) - a z` for (N, C, H, W) states; `rows` are their steps, one or N."""

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
        """Step k of the chain as the scheduler does it, (B, C, H, W)."""
        t = self.times(torch.tensor([k]), z).expand(len(z))
        xi = None if noise is None else noise[:, k]
        r = self.residual(z, self.evaluate(z, t), xi, torch.tensor([k]))
        return (float(self.steps.a[k]) * z.to(r.dtype) + r).to(z.dtype)

    def sequential(
        self,
        z0: Tensor,
        noise: Tensor | None = None,
        each: Callable[[int, Tensor], object] | None = None,
    ) -> Tensor:
        """The chain one step after the other: its image; differentiable if `z0` asks for it.

        Args:
            z0: the initial noise.
            noise: of the whole chain.
            each: called with every step's number and state.
        """
        self.check(z0, noise)
        z = z0
        graph = torch.is_grad_enabled() and (
            z0.requires_grad or (noise is not None and noise.requires_grad)
        )
        with torch.set_grad_enabled(graph):
            for k in range(len(self)):
                z = self.step(z, k, noise)
                if each is not None:
                    each(k, z)
        return z

    def states(self, z0: Tensor, noise: Tensor | None = None) -> Tensor:
        """All states of the chain, one after the other: (B, T, C, H, W)."""
        held: list[Tensor] = []
        self.sequential(z0, noise, lambda k, z: held.append(z))
        return torch.stack(held, dim=1)

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Noise from which the deterministic chain leads close to the images: DDIM backwards.

        Step k is undone with the network's output at its end instead of its start; an image counts
        as a state at the last timestep.
        """
        self.check(images, None, noisy=False)
        s, z = self.steps, images
        for k in reversed(range(1, len(s))):
            t = self.times(torch.tensor([k]), z).expand(len(z))
            m, wide = self.evaluate(z, t).to(precision(z)), z.to(precision(z))
            x = float(s.p[k]) * wide + float(s.q[k]) * m
            eps = (wide - float(s.ab[k].sqrt()) * x) / float((1 - s.ab[k]).sqrt())
            to = s.ab[k - 1]
            z = (float(to.sqrt()) * x + float((1 - to).sqrt()) * eps).to(z.dtype)
        return z

    def check(self, z0: Tensor, noise: Tensor | None, noisy: bool = True) -> None:
        """Whether initial and further noises fit the chain, and the network is at rest."""
        if z0.dim() != 4 or not z0.is_floating_point():
            raise ValueError(f"z0 must be (B, C, H, W) floats, got {tuple(z0.shape)} {z0.dtype}")
        if noisy and self.steps.stochastic and noise is None:
            raise ValueError(
                "this chain adds noise at each step: give noise (B, T, C, H, W), e.g. "
                "chain.noise(z0, generator)"
            )
        if noise is not None and not self.steps.stochastic:
            raise ValueError("this chain adds no noise (eta is 0): drop noise")
        want = (len(z0), len(self), *z0.shape[1:])
        if noise is not None and tuple(noise.shape) != want:
            raise ValueError(f"noise must be (B, T, C, H, W) = {want}, got {tuple(noise.shape)}")
        for name, module in self.unet.named_modules():
            if module.training:
                raise ValueError(
                    f"{name or 'the network'} is in training mode, where no two evaluations need "
                    "be alike: call unet.eval() first"
                )

    def noise(self, z0: Tensor, generator: torch.Generator | None = None) -> Tensor | None:
        """Unit noises for the chain, None if it needs none; drawn on the generator's device."""
        if not self.steps.stochastic:
            return None
        shape = (len(z0), len(self), *z0.shape[1:])
        where = z0.device if generator is None else generator.device
        return torch.randn(shape, generator=generator, device=where, dtype=z0.dtype).to(z0.device)


def precision(like: Tensor) -> torch.dtype:
    """The dtype of recursions: float64 where the device has it."""
    return torch.float32 if like.device.type == "mps" else torch.float64
