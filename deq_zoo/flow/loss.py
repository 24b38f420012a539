"""The loss of DEQ-Flow: absolute errors of all sampled states, the last with most weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deq_zoo.flow.metrics import LONGEST, NEAR, endpoint_error
from torchdeq import fp_correction


def counted(truth: Tensor, valid: Tensor) -> Tensor:
    """Return (N, 1, H, W): where a true flow (N, 2, H, W) is valid (N, H, W) and not extreme."""
    return ((valid >= 0.5) & (truth.square().sum(1).sqrt() < LONGEST))[:, None]


def flow_loss(flow: Tensor, truth: Tensor, mask: Tensor) -> Tensor:
    """Return the mean absolute error over all pixels; pixels outside the mask count as 0."""
    return torch.where(mask, (flow - truth).abs(), 0).mean()


def sequence_loss(
    flows: Sequence[Tensor], truth: Tensor, valid: Tensor, gamma: float = 0.8
) -> Tensor:
    r"""Return the loss of fixed-point correction, $\sum_k \gamma^{n-k} |f_k - f|$."""
    mask = counted(truth, valid)
    return fp_correction(lambda flow: flow_loss(flow, truth, mask), (list(flows),), gamma=gamma)


def training_metrics(flow: Tensor, truth: Tensor, valid: Tensor) -> dict[str, Tensor]:
    """Return the mean error and the shares of small errors, over the pixels that count."""
    mask = counted(truth, valid)[:, 0]
    error = endpoint_error(flow.detach(), truth)
    n = mask.sum().clamp_min(1)
    metrics = {"epe": torch.where(mask, error, 0).sum() / n}
    for limit in NEAR:
        metrics[f"{limit}px"] = 100 * (mask & (error < limit)).sum() / n
    return metrics
