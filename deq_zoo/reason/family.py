"""The declaration of the family `reason`; it imports nothing of the family."""

from deq_zoo.family import Family
from deq_zoo.packages import install

FAMILY = Family(
    name="reason",
    description="Reasoners (HRM, TRM, EqR): puzzles, solved by a recursion in equilibrium.",
    presets="deq_zoo.reason.presets",
    tasks=("deq_zoo.reason.task:SolvePuzzles",),
    install=install("reason"),
    predicts="Text files of Sudokus or mazes; the answer to each, and how sure it is, are printed.",
    converter="deq_zoo.reason.convert",
    service="deq_zoo.reason.service",
)
