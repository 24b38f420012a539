"""The declaration of the family `inr`; it imports nothing of the family."""

from deq_zoo.family import Family
from deq_zoo.packages import install

FAMILY = Family(
    name="inr",
    description="DEQ-INR: images, sounds and videos as functions of coordinates.",
    presets="deq_zoo.inr.presets",
    tasks=(
        "deq_zoo.inr.task:FitSignal",
        "deq_zoo.inr.task:GeneraliseImage",
        "deq_zoo.inr.duel:Duel",
        "deq_zoo.inr.shape_task:FitShape",
    ),
    packages=("scipy", "skimage"),
    install=install("inr"),
    samples="The signal at any resolution, as PNG, WAV or video.",
    converter="deq_zoo.inr.convert",
    service="deq_zoo.inr.service",
)
