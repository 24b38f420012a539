"""A pipeline of diffusers that samples in parallel."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deq_zoo.diffusion.chain import ParallelChain
from deq_zoo.diffusion.package import diffusers
from deq_zoo.diffusion.sampling import Progress, Trajectory, parallel_sample
from torchdeq import StopRule

_diffusers = diffusers()


class DEQDDIMPipeline(_diffusers.DiffusionPipeline):  # type: ignore[misc,name-defined]
    """A pipeline for unconditional images by DDIM that solves all steps at once.

    It is called, saved and loaded like `DDIMPipeline`; folders of `DDIMPipeline` and `DDPMPipeline`
    load as they are, and the images are those of DDIM.

    Args:
        unet: a `UNet2DModel`.
        scheduler: any of diffusers whose configuration fits DDIM's.
    """

    model_cpu_offload_seq = "unet"

    def __init__(self, unet: nn.Module, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(
            unet=unet, scheduler=_diffusers.DDIMScheduler.from_config(scheduler.config)
        )

    @torch.no_grad()
    def __call__(
        self,
        batch_size: int = 1,
        generator: torch.Generator | list[torch.Generator] | None = None,
        eta: float = 0.0,
        num_inference_steps: int = 50,
        output_type: str = "pil",
        return_dict: bool = True,
        *,
        solver: str = "fixed_point_iter",
        tol: float = 1e-4,
        max_iter: int = 0,
        window: int = 0,
        chunk: int = 64,
        progress: Progress | None = None,
    ) -> Any:
        """Sample images.

        Args:
            batch_size: the number of images.
            generator: of the noise: one, or one per image.
            eta: 0 for DDIM, 1 for as much noise as DDPM.
            num_inference_steps: of the chain.
            output_type: `"pil"`, `"np"` or `"pt"`; the latter two in [0, 1].
            return_dict: whether to return an `ImagePipelineOutput`, else a tuple.
            solver: any registered solver.
            tol: relative residual of each image's states.
            max_iter: evaluations allowed; 0 for twice the steps.
            window: states solved at once; 0 for all.
            chunk: the largest batch that the network gets.
            progress: called with the number and the residual of each round.
        """
        if output_type not in ("pil", "np", "pt"):
            raise ValueError(f"output_type must be 'pil', 'np' or 'pt', got {output_type!r}")
        trajectory = self.trajectory(
            batch_size, generator, eta, num_inference_steps, solver, tol, max_iter, window, chunk,
            progress,
        )  # fmt: skip
        images: Any = (trajectory.image / 2 + 0.5).clamp(0, 1)
        if output_type != "pt":
            images = images.cpu().permute(0, 2, 3, 1).float().numpy()
        if output_type == "pil":
            images = self.numpy_to_pil(images)
        return _diffusers.ImagePipelineOutput(images=images) if return_dict else (images,)

    def trajectory(
        self,
        batch_size: int,
        generator: Any,
        eta: float,
        steps: int,
        solver: str,
        tol: float,
        max_iter: int,
        window: int,
        chunk: int,
        progress: Progress | None,
    ) -> Trajectory:
        """Return all states of the chain, with statistics of the solve."""
        size = self.unet.config.sample_size
        sides = (size, size) if isinstance(size, int) else tuple(size)
        shape = (batch_size, self.unet.config.in_channels, *sides)
        device, kind = self._execution_device, self.unet.dtype
        chain = ParallelChain(self.unet, self.scheduler, steps, eta, chunk=chunk)
        # A sequential pipeline draws in this order: initial noise, then step by step.
        randn_tensor = _diffusers.utils.torch_utils.randn_tensor
        x = randn_tensor(shape, generator=generator, device=device, dtype=kind)
        noise = None
        if chain.steps.stochastic:
            drawn = [
                randn_tensor(shape, generator=generator, device=device, dtype=kind)
                for _ in range(len(chain))
            ]
            noise = torch.stack(drawn, dim=1)
        stop = StopRule(max_iter or 2 * len(chain) + 10, tol, "rel")
        return parallel_sample(
            chain, x, noise, solver=solver, stop=stop, window=window, progress=progress
        )
