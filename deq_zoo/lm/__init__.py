"""Language models whose hidden states are equilibria: DEQ transformers and attractors."""

from typing import TYPE_CHECKING

from deq_zoo.lazy import lazy_names

if TYPE_CHECKING:
    from deq_zoo.lm.adaptive import AdaptiveVocabulary
    from deq_zoo.lm.attractor.model import Attractor
    from deq_zoo.lm.attractor.streaming import write_many
    from deq_zoo.lm.config import LMConfig
    from deq_zoo.lm.hugging_face import DEQForCausalLM, save_folder
    from deq_zoo.lm.language_model import LanguageModel
    from deq_zoo.lm.memory import LMOutput, Memory
    from deq_zoo.lm.model import DEQTransformer
    from deq_zoo.lm.prediction import TextScore

__all__ = [
    "AdaptiveVocabulary",
    "Attractor",
    "DEQForCausalLM",
    "DEQTransformer",
    "LMConfig",
    "LMOutput",
    "LanguageModel",
    "Memory",
    "TextScore",
    "save_folder",
    "write_many",
]

__getattr__ = lazy_names(
    __name__,
    {
        "AdaptiveVocabulary": "adaptive",
        "Attractor": "attractor.model",
        "DEQForCausalLM": "hugging_face",
        "DEQTransformer": "model",
        "LMConfig": "config",
        "LMOutput": "memory",
        "LanguageModel": "language_model",
        "Memory": "memory",
        "TextScore": "prediction",
        "save_folder": "hugging_face",
        "write_many": "attractor.streaming",
    },
)
