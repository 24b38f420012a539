"""Scores of texts for a server: every text is a chain of solves, segment by segment."""

from __future__ import annotations

from typing import Any

from deq_zoo.errors import ZooError
from deq_zoo.lm.language_model import LanguageModel
from deq_zoo.model import Model
from deq_zoo.serving.service import Field, Service, Values, describe_stats


class TextScores(Service[LanguageModel]):
    """How likely the model finds a text."""

    fields = (Field("text", "text", "the text to score"),)

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        model.lexicon.require()  # raises without a tokenizer

    def answer(self, values: Values) -> dict[str, Any]:
        found = self.model.predict(values["text"])
        score = found.prediction
        return {
            "prediction": f"perplexity {score.perplexity:.4g}",
            **score.as_data(),
            "log_probs": score.log_probs.tolist(),
            **describe_stats(found.stats),
        }


def make_service(model: Model) -> TextScores:
    """Return the service of a language model."""
    if not isinstance(model, LanguageModel):
        raise ZooError(f"{type(model).__name__} cannot be served")
    return TextScores(model)
