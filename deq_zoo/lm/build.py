"""Building the language model of a design."""

from __future__ import annotations

from typing import Any

from deq_zoo.lm.attractor.model import Attractor
from deq_zoo.lm.config import LMConfig
from deq_zoo.lm.language_model import LanguageModel
from deq_zoo.lm.model import DEQTransformer


def build_model(config: LMConfig, deq: Any = None) -> LanguageModel:
    """Return a new language model.

    Args:
        config: the shape.
        deq: options of the DEQ: a `DEQConfig`, dict or Namespace.
    """
    kind = Attractor if config.design == "attractor" else DEQTransformer
    return kind(config, deq)
