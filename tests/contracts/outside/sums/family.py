"""The declaration: no torch here."""

from deq_zoo.family import Family

FAMILY = Family(
    name="sums",
    description="An equilibrium layer that adds numbers.",
    presets="sums.presets",
    tasks=("sums.presets:AddNumbers",),
    predicts="Files with eight numbers; their sum is printed.",
)
