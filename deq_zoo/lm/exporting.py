"""Language models for other programs: tokens in, the log-probability of the next ones out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deq_zoo.checks import check_fields
from deq_zoo.exportable import Exportable
from deq_zoo.lm.language_model import LanguageModel

_BEFORE = (
    "Cut a text into token ids by the tokenizer of the checkpoint (facts.tokens is the size of its "
    "vocabulary), and into segments of facts.length ids. `ids` are the tokens of a segment, "
    "`targets` those one place further on. Fill a short segment with any ids at its end: a token "
    "does not depend on later ones."
)
_AFTER = (
    "`log_probs` are the log-probabilities, in nats, of the targets. Every segment is scored on "
    "its own, without a memory of the text before it."
)


@dataclass(frozen=True)
class SegmentLength:
    """The options of an export.

    Args:
        length: tokens of a segment; 0 takes that of training.
    """

    length: int = 0

    def __post_init__(self) -> None:
        check_fields(self, 0, "length")


class LogProbs(nn.Module):
    """A language model that scores a segment."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, targets: Tensor) -> dict[str, Tensor]:
        log_prob = self.model.log_prob(self.model(ids).z)
        return {"log_probs": log_prob.gather(2, targets[..., None]).squeeze(2)}


def make_export(model: LanguageModel, length: int) -> Exportable:
    """Return a language model as other programs call it, for segments of one length."""
    rng, tokens = torch.Generator().manual_seed(0), model.config.tokens
    ids = torch.randint(tokens, (2, length + 1), generator=rng)
    return Exportable(
        LogProbs(model),
        {"ids": ids[:, :-1].clone(), "targets": ids[:, 1:].clone()},
        {
            "ids": "tokens",
            "targets": "the tokens that follow",
            "log_probs": "of the targets, in nats",
        },
        _BEFORE,
        _AFTER,
        {"length": length, "tokens": tokens},
    )
