"""The declaration of the family `lm`; it imports nothing of the family."""

from deq_zoo.family import Family
from deq_zoo.packages import install

FAMILY = Family(
    name="lm",
    description="DEQ Transformer and attractor: language models whose states are equilibria.",
    presets="deq_zoo.lm.presets",
    tasks=("deq_zoo.lm.task:LanguageTask",),
    packages=("tokenizers",),
    install=install("lm"),
    predicts="Text files; prints the perplexity of each, --out writes log-probabilities as JSON.",
    samples="Text that continues a prompt; prints it line by line, --out writes sample.txt.",
    converter="deq_zoo.lm.convert",
    service="deq_zoo.lm.service",
    pipeline_tag="text-generation",
)
