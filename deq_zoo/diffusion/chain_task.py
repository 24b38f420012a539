"""A task whose denoiser is sampled from, and images inverted with, as an equilibrium."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from deq_zoo.diffusion.adjoint import Adjoint
from deq_zoo.diffusion.chain import ParallelChain
from deq_zoo.diffusion.inversion import Inversion, invert
from deq_zoo.diffusion.model import UNetConfig
from deq_zoo.diffusion.options import ChainConfig, InversionConfig, Sampling
from deq_zoo.diffusion.package import diffusers
from deq_zoo.diffusion.sampling import parallel_sample
from deq_zoo.diffusion.steps import spaced
from deq_zoo.errors import ZooError
from deq_zoo.task import Task, generator
from torchdeq import Phantom, SolverStat
from torchdeq.registry import suggest
from torchdeq.solver import SOLVERS, make_solver


class ChainTask(Task):
    """The use of a denoiser, apart from its training: chains, inversion, sampling.

    Subclasses are frozen dataclasses with these fields.
    """

    net: UNetConfig
    chain: ChainConfig
    inversion: InversionConfig
    noise_levels: int
    prediction: Literal["epsilon", "v_prediction"]

    @cached_property
    def scheduler(self) -> Any:
        """DDIM's scheduler for the noise levels of training: linear betas, nothing clipped."""
        return diffusers().DDIMScheduler(
            num_train_timesteps=self.noise_levels,
            clip_sample=False,
            prediction_type=self.prediction,
        )

    def make_chain(self, model: nn.Module, config: ChainConfig) -> ParallelChain:
        """A chain of the model's."""
        t = spaced(config.spacing, config.steps, self.noise_levels)
        return ParallelChain(model, self.scheduler, t, config.eta, config.scope, chunk=config.chunk)

    def initial(
        self, chain: ParallelChain, n: int, seed: int, device: torch.device
    ) -> tuple[Tensor, Tensor | None]:
        """Noise to start from, and that of the steps; the same on every device."""
        rng = generator("sample", seed)
        z0 = torch.randn(n, self.net.channels, self.net.size, self.net.size, generator=rng)
        noise = chain.noise(z0, rng)
        return z0.to(device), None if noise is None else noise.to(device)

    def solved(
        self, chain: ParallelChain, z0: Tensor, noise: Tensor | None, window: int | None = None
    ) -> tuple[Tensor, SolverStat, Any]:
        """Images, how the solve went and what it took, as the options say."""
        rule = make_solver(self.deq.f_solver, self.deq.f_solver_kwargs)
        found = parallel_sample(
            chain, z0, noise, solver=rule, stop=self.deq.f_stop, on_failure="ignore",
            window=self.chain.window if window is None else window,
        )  # fmt: skip
        return found.image, found.stats, found.work

    def invert(self, model: nn.Module, images: Tensor) -> Inversion:
        """Noise for images, as the options say."""
        deq, how = self.deq, self.inversion
        chain = self.make_chain(model, self.chain)
        rng = generator("inversion")
        return invert(
            chain,
            images,
            method="implicit" if deq.implicit else "phantom",
            steps=how.steps,
            lr=how.lr,
            noise=chain.noise(images, rng),
            solver=make_solver(deq.f_solver, deq.f_solver_kwargs),
            stop=deq.f_stop,
            adjoint=Adjoint(window=how.window, tol=deq.b_tol),
            phantom=Phantom(grad=deq.grad[-1], tau=deq.tau),
            warm=how.warm,
            enough=how.enough,
        )

    def sampling(self) -> Sampling:
        return Sampling(eta=self.chain.eta, steps=self.chain.steps, window=self.chain.window)

    def sample(
        self, model: nn.Module, options: Sampling, out: Path, device: torch.device
    ) -> Iterator[str]:
        """Sample images into one picture."""
        try:
            yield self._sample(model, options, out, device)
        except (ValueError, NotImplementedError) as error:
            raise ZooError(f"cannot sample: {error}") from error

    def _sample(self, model: nn.Module, options: Sampling, out: Path, device: torch.device) -> str:
        from deq_zoo.diffusion.pictures import write_grid

        sequential = options.solver == "sequential"
        if not sequential and options.solver not in SOLVERS:
            names = [*SOLVERS, "sequential"]
            raise ZooError(f"unknown solver {options.solver!r}{suggest(options.solver, names)}")
        config = replace(self.chain, steps=options.steps, eta=options.eta)
        chain = self.make_chain(model, config)
        z0, noise = self.initial(chain, options.n, options.seed, device)
        out.mkdir(parents=True, exist_ok=True)
        path = out / f"samples-{options.seed}.png"
        with torch.no_grad():
            if sequential:
                images, summary = chain.sequential(z0, noise), f"{len(chain)} rounds"
            else:
                deq = self.deq.with_options(
                    f_tol=options.tol, f_stop_mode="rel", f_max_iter=2 * len(chain) + 10
                )
                if options.solver != deq.f_solver:
                    deq = deq.with_options(f_solver=options.solver, f_solver_kwargs={})
                task = replace(self, deq=deq)  # type: ignore[type-var]
                images, stats, work = task.solved(chain, z0, noise, options.window)
                summary = (
                    f"{work.rounds} rounds instead of {len(chain)}, {work.evaluations} "
                    f"evaluations, relative residual {float(stats['rel_lowest'].max()):.1e}"
                )
        write_grid(path, images)
        return f"{options.n} images in {path}: {summary}"
