"""Metrics that several families share."""

from __future__ import annotations

from torch import Tensor


def accuracy(logits: Tensor, y: Tensor) -> float:
    """Return the percentage of rows whose largest logit is that of the right class.

    A row with NaN or infinity is wrong; of no rows at all, the accuracy is NaN.

    Args:
        logits: (N, classes).
        y: (N,) the right classes.
    """
    right = (logits.argmax(dim=1) == y) & logits.isfinite().all(dim=1)
    return 100 * float(right.double().mean())
