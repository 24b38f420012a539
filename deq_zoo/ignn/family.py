"""The declaration of the family `ignn`; it imports nothing of the family."""

from deq_zoo.family import Family
from deq_zoo.packages import install

FAMILY = Family(
    name="ignn",
    description="IGNN: classes and labels of nodes and graphs, by an equilibrium on the graph.",
    presets="deq_zoo.ignn.presets",
    tasks=(
        "deq_zoo.ignn.task:NodeTask",
        "deq_zoo.ignn.task:NodeLabelTask",
        "deq_zoo.ignn.set_task:TissueTask",
        "deq_zoo.ignn.set_task:GraphClassTask",
    ),
    packages=("networkx", "torchmetrics"),
    install=install("ignn"),
    predicts="Graphs in .npz files; their classes are printed, with --out also written as CSV.",
    converter="deq_zoo.ignn.convert",
    service="deq_zoo.ignn.service",
    pipeline_tag="graph-ml",
)
