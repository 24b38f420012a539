"""The use of a denoiser, apart from its training: its chain, solved and inverted as options say."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from deq_zoo.diffusion.adjoint import Adjoint
from deq_zoo.diffusion.chain import ParallelChain
from deq_zoo.diffusion.inversion import Inversion, invert
from deq_zoo.diffusion.options import ChainConfig, InversionConfig
from deq_zoo.diffusion.package import diffusers
from deq_zoo.diffusion.sampling import Trajectory, parallel_sample
from deq_zoo.diffusion.steps import spaced
from deq_zoo.model import Model
from deq_zoo.task import generator
from deq_zoo.uses import SOLVE
from torchdeq import DEQConfig, Phantom
from torchdeq.solver import make_solver

Kind = Literal["epsilon", "v_prediction"]
#: The exact gradient; plain iteration cannot fail on a triangular system.
EXACT = DEQConfig(
    f_solver="fixed_point_iter",
    f_max_iter=60,
    f_tol=1e-4,
    f_stop_mode="rel",
    ift=True,
    on_failure="ignore",
)
# The chain is solved outside training only, so it has one budget; it says itself which rows are
# coupled.
_SOLVE = SOLVE - {"coupled", "eval_factor", "eval_f_max_iter", "compile_f"}


@dataclass(frozen=True)
class ChainPlan:
    """The chain of a denoiser, with its solver and its inversion.

    Args:
        deq: options of the solver and of the gradient.
        chain: the chain of sampling steps.
        inversion: the inversion of images.
        noise_levels: timesteps of training.
        prediction: the output of the network; see `Denoise`.
    """

    deq: DEQConfig = EXACT
    chain: ChainConfig = field(default_factory=ChainConfig)
    inversion: InversionConfig = field(default_factory=InversionConfig)
    noise_levels: int = 1000
    prediction: Kind = "epsilon"

    def __post_init__(self) -> None:
        if self.chain.steps > self.noise_levels:
            raise ValueError(
                f"a chain has at most noise_levels={self.noise_levels} steps, got "
                f"{self.chain.steps}"
            )
        if self.deq.backward == "reversible":
            raise ValueError(
                "backward='reversible' is no gradient of a sampling chain: choose 'ift', the exact "
                "one, or 'phantom'"
            )
        if self.deq.implicit and (self.deq.tau != 1 or self.deq.grad != [1]):
            raise ValueError(
                f"tau={self.deq.tau} and grad={self.deq.grad} are options of the phantom gradient "
                "and have no effect on the exact one of ift: drop ift, or set tau=1 and grad=1"
            )

    @property
    def uses(self) -> frozenset[str]:
        """Return the names of the options in `deq` that have an effect.

        The adjoint of the exact gradient is a sweep of one product a step, without a solver; only
        an adjoint in windows has a tolerance.
        """
        gradient = {"backward", "ift", "hook_ift"}
        if not self.deq.implicit:
            gradient |= {"grad", "tau"}
        elif self.inversion.window != 1:
            gradient.add("b_tol")
        return _SOLVE | gradient

    def with_options(self, steps: int | None = None, **options: Any) -> ChainPlan:
        """Return the plan with other options of the DEQ, and other steps of Adam if given."""
        changed = replace(self, deq=self.deq.with_options(**options))
        unused = sorted(options.keys() - changed.uses)
        if unused:
            raise ValueError(f"{', '.join(unused)} would have no effect on a sampling chain")
        if steps is not None:
            changed = replace(changed, inversion=replace(self.inversion, steps=steps))
        return changed

    def limited(self, chain_steps: int, adam_steps: int) -> ChainPlan:
        """Return the plan with at most so many steps of the chain and of Adam."""
        return replace(
            self,
            chain=replace(self.chain, steps=min(self.chain.steps, chain_steps)),
            inversion=replace(self.inversion, steps=min(self.inversion.steps, adam_steps)),
        )

    @cached_property
    def scheduler(self) -> Any:
        """Return DDIM's scheduler for the noise levels of training: linear betas, no clipping."""
        return diffusers().DDIMScheduler(
            num_train_timesteps=self.noise_levels,
            clip_sample=False,
            prediction_type=self.prediction,
        )

    def make_chain(self, unet: nn.Module) -> ParallelChain:
        """Return the chain of a network."""
        c = self.chain
        t = spaced(c.spacing, c.steps, self.noise_levels)
        return ParallelChain(unet, self.scheduler, t, c.eta, c.scope, chunk=c.chunk)

    def solve(self, chain: ParallelChain, x: Tensor, noise: Tensor | None = None) -> Trajectory:
        """Return the states of a chain for initial noise and the noises of its steps."""
        return parallel_sample(
            chain,
            x,
            noise,
            solver=make_solver(self.deq.f_solver, self.deq.f_solver_kwargs),
            stop=self.deq.f_stop,
            window=self.chain.window,
            on_failure=self.deq.on_failure,
        )

    def invert(
        self,
        chain: ParallelChain,
        images: Tensor,
        noise: Tensor | None = None,
        x: Tensor | None = None,
        z0: Tensor | None = None,
    ) -> Inversion:
        """Return initial noise for images; the arguments are those of `inversion.invert`."""
        deq, how = self.deq, self.inversion
        return invert(
            chain,
            images,
            method="implicit" if deq.implicit else "phantom",
            steps=how.steps,
            lr=how.lr,
            x=x,
            noise=noise,
            solver=make_solver(deq.f_solver, deq.f_solver_kwargs),
            stop=deq.f_stop,
            adjoint=Adjoint(window=how.window, tol=deq.b_tol, on_failure=deq.on_failure),
            phantom=Phantom(grad=deq.grad[-1], tau=deq.tau),
            z0=z0,
            keep_states=how.keep_states,
            enough=how.enough,
            on_failure=deq.on_failure,
        )


def draw_noise(
    chain: ParallelChain, shape: tuple[int, ...], seed: int, model: Model
) -> tuple[Tensor, Tensor | None]:
    """Return initial noise of a shape (n, C, H, W) and noises of the steps, alike on any device.

    They are on the device and in the precision of the model.
    """
    rng = generator("sample", seed)
    x = torch.randn(shape, generator=rng)
    noise = chain.noise(x, rng)
    return model.place(x), None if noise is None else model.place(noise)


def step_noise(chain: ParallelChain, images: Tensor) -> Tensor | None:
    """Return the noises of the steps with which images are inverted; None without noise."""
    return chain.noise(images, generator("inversion"))
