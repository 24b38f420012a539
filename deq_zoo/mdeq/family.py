"""The declaration of the family `mdeq`; it imports nothing of the family."""

from deq_zoo.family import Family
from deq_zoo.packages import install

FAMILY = Family(
    name="mdeq",
    description="MDEQ: classes of images, by a pyramid of features in equilibrium.",
    presets="deq_zoo.mdeq.presets",
    tasks=("deq_zoo.mdeq.task:ClassifyImages",),
    packages=("mlxtend",),
    install=install("mdeq"),
    predicts="Image files; the likeliest classes of each are printed.",
    converter="deq_zoo.mdeq.convert",
    service="deq_zoo.mdeq.service",
    pipeline_tag="image-classification",
)
