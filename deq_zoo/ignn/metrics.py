"""F1 scores in percent."""

from __future__ import annotations

import torch
from torch import Tensor


def f1_scores(marked: Tensor, y: Tensor) -> dict[str, float]:
    """Return micro-F1, over all labels of all nodes at once, and macro-F1, the mean over labels.

    Without nodes both are NaN.

    Args:
        marked: (N, C) which labels are predicted.
        y: (N, C) which are right.
    """
    from torchmetrics.functional.classification import multilabel_f1_score

    scores = {}
    for average in ("micro", "macro"):
        value = torch.tensor(torch.nan)
        if len(y):
            value = multilabel_f1_score(marked.int(), y.int(), y.shape[1], average=average)
        scores[f"{average}_f1"] = 100 * float(value)
    return scores


def oracle_labels(logits: Tensor, y: Tensor) -> Tensor:
    """Return (N, C): for each node as many of its largest logits as it has labels."""
    rank = logits.argsort(dim=1, descending=True).argsort(dim=1)
    return rank < y.sum(dim=1, keepdim=True).to(torch.int64)
