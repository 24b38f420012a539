"""DEQ-DDIM: sampling chains of diffusion models as equilibria (Pokle et al., 2022)."""

from typing import TYPE_CHECKING, Any

from deq_zoo.diffusion.adjoint import Adjoint, Work
from deq_zoo.diffusion.chain import ParallelChain
from deq_zoo.diffusion.inversion import Inversion, interpolate, invert
from deq_zoo.diffusion.model import Denoiser, UNetConfig, make_unet
from deq_zoo.diffusion.sampling import Trajectory, parallel_sample
from deq_zoo.diffusion.steps import Steps, spaced

if TYPE_CHECKING:
    from deq_zoo.diffusion.pipeline import DEQDDIMPipeline

__all__ = [
    "Adjoint",
    "DEQDDIMPipeline",
    "Denoiser",
    "Inversion",
    "ParallelChain",
    "Steps",
    "Trajectory",
    "UNetConfig",
    "Work",
    "interpolate",
    "invert",
    "make_unet",
    "parallel_sample",
    "spaced",
]


def __getattr__(name: str) -> Any:
    """The pipeline is a class of diffusers', which is imported when it is asked for."""
    if name == "DEQDDIMPipeline":
        from deq_zoo.diffusion.pipeline import DEQDDIMPipeline

        return DEQDDIMPipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
