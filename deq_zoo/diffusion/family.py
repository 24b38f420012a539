"""The declaration of the family `diffusion`; it imports nothing of the family."""

from deq_zoo.family import Family
from deq_zoo.packages import install

FAMILY = Family(
    name="diffusion",
    description="DEQ-DDIM: sampling chains of diffusion models, solved and inverted in parallel.",
    presets="deq_zoo.diffusion.presets",
    tasks=("deq_zoo.diffusion.task:Denoise",),
    packages=("diffusers", "mlxtend"),
    install=install("diffusion"),
    predicts="Image files to invert; the noise (safetensors) and the reconstruction (PNG) of each.",
    samples="Images from noise, side by side in a PNG file.",
    converter="deq_zoo.diffusion.convert",
    service="deq_zoo.diffusion.service",
    pipeline_tag="unconditional-image-generation",
)
