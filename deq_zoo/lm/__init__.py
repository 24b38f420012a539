"""The DEQ transformer: language models whose hidden states are equilibria (Bai et al., 2019)."""

from deq_zoo.lm.adaptive import AdaptiveVocabulary
from deq_zoo.lm.model import DEQTransformer, LMConfig, Memory, Output

__all__ = ["AdaptiveVocabulary", "DEQTransformer", "LMConfig", "Memory", "Output"]
