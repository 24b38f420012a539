"""The DEQ transformer: language models whose hidden states are equilibria (Bai et al., 2019)."""

from typing import TYPE_CHECKING

from deq_zoo.lazy import lazy_names

if TYPE_CHECKING:
    from deq_zoo.lm.adaptive import AdaptiveVocabulary
    from deq_zoo.lm.config import LMConfig
    from deq_zoo.lm.memory import LMOutput, Memory
    from deq_zoo.lm.model import DEQTransformer
    from deq_zoo.lm.prediction import TextScore

__all__ = [
    "AdaptiveVocabulary",
    "DEQTransformer",
    "LMConfig",
    "LMOutput",
    "Memory",
    "TextScore",
]

__getattr__ = lazy_names(
    __name__,
    {
        "AdaptiveVocabulary": "adaptive",
        "DEQTransformer": "model",
        "LMConfig": "config",
        "LMOutput": "memory",
        "Memory": "memory",
        "TextScore": "prediction",
    },
)
