"""The DEQ transformer: language models whose hidden states are equilibria (Bai et al., 2019)."""

from typing import TYPE_CHECKING

from deq_zoo.lazy import lazy_names

if TYPE_CHECKING:
    from deq_zoo.lm.adaptive import AdaptiveVocabulary
    from deq_zoo.lm.model import DEQTransformer, LMConfig, Memory, Output

__all__ = ["AdaptiveVocabulary", "DEQTransformer", "LMConfig", "Memory", "Output"]

__getattr__ = lazy_names(
    __name__,
    {
        "AdaptiveVocabulary": "adaptive",
        "DEQTransformer": "model",
        "LMConfig": "model",
        "Memory": "model",
        "Output": "model",
    },
)
