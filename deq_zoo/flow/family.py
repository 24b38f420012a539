"""The declaration of the family `flow`; it imports nothing of the family."""

from deq_zoo.family import Family
from deq_zoo.packages import install

FAMILY = Family(
    name="flow",
    description="DEQ-Flow: optical flow between two frames.",
    presets="deq_zoo.flow.presets",
    tasks=(
        "deq_zoo.flow.task:WarpTask",
        "deq_zoo.flow.task:StageTask",
        "deq_zoo.flow.scene_task:SceneTask",
    ),
    packages=("skimage", "sklearn"),
    install=install("flow"),
    predicts="Frames, videos or the folder of a benchmark; flows are written as .flo and .png.",
    converter="deq_zoo.flow.convert",
    service="deq_zoo.flow.service",
)
