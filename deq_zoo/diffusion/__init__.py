"""DEQ-DDIM: sampling chains of diffusion models as equilibria (Pokle et al., 2022)."""

from typing import TYPE_CHECKING

from deq_zoo.lazy import lazy_names

if TYPE_CHECKING:
    from deq_zoo.diffusion.adjoint import Adjoint, Work
    from deq_zoo.diffusion.chain import ParallelChain
    from deq_zoo.diffusion.inversion import Inversion, interpolate, invert
    from deq_zoo.diffusion.model import Denoised, Denoiser, UNetConfig, make_unet
    from deq_zoo.diffusion.options import ChainConfig, InversionConfig
    from deq_zoo.diffusion.pipeline import DEQDDIMPipeline
    from deq_zoo.diffusion.plan import ChainPlan
    from deq_zoo.diffusion.prediction import InvertedImage
    from deq_zoo.diffusion.sampling import Trajectory, parallel_sample
    from deq_zoo.diffusion.steps import Steps, spaced

__all__ = [
    "Adjoint",
    "ChainConfig",
    "ChainPlan",
    "DEQDDIMPipeline",
    "Denoised",
    "Denoiser",
    "Inversion",
    "InversionConfig",
    "InvertedImage",
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

__getattr__ = lazy_names(
    __name__,
    {
        "Adjoint": "adjoint",
        "ChainConfig": "options",
        "ChainPlan": "plan",
        "DEQDDIMPipeline": "pipeline",
        "Denoised": "model",
        "Denoiser": "model",
        "Inversion": "inversion",
        "InversionConfig": "options",
        "InvertedImage": "prediction",
        "ParallelChain": "chain",
        "Steps": "steps",
        "Trajectory": "sampling",
        "UNetConfig": "model",
        "Work": "adjoint",
        "interpolate": "inversion",
        "invert": "inversion",
        "make_unet": "model",
        "parallel_sample": "sampling",
        "spaced": "steps",
    },
)
