"""The encoder of the smallest model: one trunk for features and context."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from deq_zoo.flow.layers import ResidualBlock, draw_convolutions


class Trunk(nn.Module):
    """Images (N, 3, H, W) to a map (N, C, H/8, W/8), from which two heads read.

    The first convolution has a stride of 4: at half the size, where the published encoder spends
    most of its time, this one has no layer. Instance norms depend on no other sample and on no
    running statistics, so batches of one pair train as well as any.

    Args:
        features: channels for the correlation.
        context: channels for the update.
        widths: channels of the first convolution, at quarters and at eighths of the size.
        dropout: share of the features' channels that training drops.
    """

    def __init__(
        self, features: int, context: int, widths: tuple[int, int, int], dropout: float = 0.0
    ) -> None:
        super().__init__()
        a, b, c = widths
        norm = partial(nn.InstanceNorm2d, affine=False)
        self.conv1 = nn.Conv2d(3, a, 8, stride=4, padding=2)
        self.norm1 = norm(a)
        self.layer1 = ResidualBlock(a, b, 1, norm)
        self.layer2 = nn.Sequential(ResidualBlock(b, c, 2, norm), ResidualBlock(c, c, 1, norm))
        self.to_features = nn.Conv2d(c, features, 1)
        self.to_context = nn.Conv2d(c, context, 3, padding=1)
        self.dropout = nn.Dropout2d(dropout)
        draw_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        shared: Tensor = self.layer2(self.layer1(x))
        return shared

    def features(self, shared: Tensor) -> Tensor:
        """Return what the correlation compares, (N, features, H/8, W/8).

        Channels have mean 0 over the image and places length 1 times the root of the number of
        channels: without that, what all places have in common hides what tells them apart, and an
        untrained model's best match is as good as chance.
        """
        x: Tensor = self.dropout(self.to_features(shared))
        x = x - x.mean((2, 3), keepdim=True)
        features: Tensor = F.normalize(x, dim=1, eps=1e-3) * x.shape[1] ** 0.5
        return features
