"""The declaration of the family `lm`; it imports nothing of the family."""

from deq_zoo.family import Family

FAMILY = Family(
    name="lm",
    description="DEQ Transformer: language models.",
    presets="deq_zoo.lm.presets",
    tasks=("deq_zoo.lm.task:LanguageTask",),
    packages=("tokenizers",),
    install="pip install 'torchdeq[lm]'",
    predicts="Text files; the perplexity of each is printed.",
    samples="Text that continues a prompt.",
    converter="deq_zoo.lm.convert",
)
