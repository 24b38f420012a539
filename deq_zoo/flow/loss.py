"""The loss of DEQ-Flow: absolute errors of every state, weighted by its place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deq_zoo.flow.metrics import LONGEST, NEAR, endpoint_error
from torchdeq import fp_correction


def counted(truth: Tensor, valid: Tensor) -> Tensor:
    """(N, 1, H, W): where a true flow (N, 2, H, W) is known (N, H, W) and not extreme."""
    return ((valid >= 0.5) & (truth.square().sum(1).sqrt() < LONGEST))[:, None]


def flow_loss(flow: Tensor, truth: Tensor, mask: Tensor) -> Tensor:
    """The mean over all pixels of the absolute error; pixels outside the mask count as none."""
    return torch.where(mask, (flow - truth).abs(), 0).mean()


def sequence_loss(
    flows: Sequence[Tensor], truth: Tensor, valid: Tensor, gamma: float = 0.8
) -> Tensor:
    r"""Fixed-point correction, $\sum_k \gamma^{n-k} |f_k - f|$."""
    mask = counted(truth, valid)
    return fp_correction(lambda flow: flow_loss(flow, truth, mask), (list(flows),), gamma=gamma)


def training_metrics(flow: Tensor, truth: Tensor, valid: Tensor) -> dict[str, Tensor]:
    """Mean error and shares of small ones, over the pixels that count."""
    mask = counted(truth, valid)[:, 0]
    error = endpoint_error(flow.detach(), truth)
    n = mask.sum().clamp_min(1)
    found = {"epe": torch.where(mask, error, 0).sum() / n}
    for limit in NEAR:
        found[f"{limit}px"] = 100 * (mask & (error < limit)).sum() / n
    return found
