"""The parts of DEQ-Flow: encoders, the motion encoder, the separable GRU, attention and heads.

Attribute names are those of the published checkpoints.
"""

from __future__ import annotations

from math import isqrt
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deq_zoo.flow.config import STRIDE
from deq_zoo.flow.offsets import Offsets
from deq_zoo.plain_layers import require_weights


class ResidualBlock(nn.Module):
    """`relu(s + y)`: two normalised convolutions y, each under a ReLU, and a skip s."""

    def __init__(self, inner: int, outer: int, stride: int, norm: Any) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, padding=1)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1)
        self.norm1, self.norm2 = norm(outer), norm(outer)
        self.downsample: nn.Module | None = None
        if stride > 1 or inner != outer:
            self.norm3 = norm(outer)
            self.downsample = nn.Sequential(nn.Conv2d(inner, outer, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        s = x if self.downsample is None else self.norm3(self.downsample(x))
        return F.relu(s + y)


class Encoder(nn.Module):
    """Images (N, 3, H, W) to features (N, out, H/8, W/8).

    Args:
        out: channels of the features.
        norm: returns a normalisation for a number of channels.
        widths: channels of the three stages, at halves, quarters and eighths of the size.
        dropout: share of the features' channels that training drops.
    """

    def __init__(
        self, out: int, norm: Any, widths: tuple[int, int, int], dropout: float = 0.0
    ) -> None:
        super().__init__()
        a, b, c = widths
        self.conv1 = nn.Conv2d(3, a, 7, stride=2, padding=3)
        self.norm1 = norm(a)
        self.layer1 = _stage(a, a, 1, norm)
        self.layer2 = _stage(a, b, 2, norm)
        self.layer3 = _stage(b, c, 2, norm)
        self.conv2 = nn.Conv2d(c, out, 1)
        self.dropout = nn.Dropout2d(dropout)
        draw_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        x = self.conv2(self.layer3(self.layer2(self.layer1(x))))
        features: Tensor = self.dropout(x)
        return features


def draw_convolutions(encoder: nn.Module) -> None:
    """Draw the weights of all convolutions of an encoder by the published rule."""
    for module in encoder.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def _stage(inner: int, outer: int, stride: int, norm: Any) -> nn.Sequential:
    return nn.Sequential(
        ResidualBlock(inner, outer, stride, norm), ResidualBlock(outer, outer, 1, norm)
    )


class MotionEncoder(nn.Module):
    """Correlations and flow to motion features, of which the last two are the flow itself."""

    def __init__(self, planes: int, corr: tuple[int, int], flow: tuple[int, int], out: int) -> None:
        super().__init__()
        self.convc1 = nn.Conv2d(planes, corr[0], 1)
        self.convc2 = nn.Conv2d(corr[0], corr[1], 3, padding=1)
        self.convf1 = nn.Conv2d(2, flow[0], 7, padding=3)
        self.convf2 = nn.Conv2d(flow[0], flow[1], 3, padding=1)
        self.conv = nn.Conv2d(corr[1] + flow[1], out - 2, 3, padding=1)

    def forward(self, corr: Tensor, flow: Tensor) -> Tensor:
        cor = F.relu(self.convc2(F.relu(self.convc1(corr))))
        flo = F.relu(self.convf2(F.relu(self.convf1(flow))))
        both = F.relu(self.conv(torch.cat((cor, flo), dim=1)))
        return torch.cat((both, flow.to(both.dtype)), dim=1)


class HalfStep(NamedTuple):
    """One direction of the GRU with the context put in, which is constant during a solve."""

    gates: Tensor  # weights (2 Dh, Dh + motion, ...) of update and reset
    candidate: Tensor  # weights (Dh, Dh + motion, ...)
    gates_context: Tensor  # (N, 2 Dh, h, w) contribution of context and bias
    candidate_context: Tensor
    padding: tuple[int, int]

    def __call__(self, hid: Tensor, motion: Tensor) -> Tensor:
        z, r = torch.sigmoid(
            F.conv2d(torch.cat((hid, motion), dim=1), self.gates, padding=self.padding)
            + self.gates_context
        ).chunk(2, dim=1)
        q = torch.tanh(
            F.conv2d(torch.cat((r * hid, motion), dim=1), self.candidate, padding=self.padding)
            + self.candidate_context
        )
        return torch.lerp(hid.to(q.dtype), q, z)


class SepConvGRU(nn.Module):
    r"""A convolutional GRU in two half-steps, along rows and along columns.

    $$z = \sigma(W_z [h, q, m]), \quad r = \sigma(W_r [h, q, m]), \quad
    h \leftarrow (1 - z) h + z \tanh(W_q [r h, q, m])$$

    The context q does not change during a solve, so `with_context` computes its share of every
    convolution once, which leaves two thirds of the work for each evaluation.
    """

    def __init__(self, hidden: int, context: int, motion: int) -> None:
        super().__init__()
        self.hidden, self.context = hidden, context
        inner = hidden + context + motion
        self.convz1 = nn.Conv2d(inner, hidden, (1, 5), padding=(0, 2))
        self.convr1 = nn.Conv2d(inner, hidden, (1, 5), padding=(0, 2))
        self.convq1 = nn.Conv2d(inner, hidden, (1, 5), padding=(0, 2))
        self.convz2 = nn.Conv2d(inner, hidden, (5, 1), padding=(2, 0))
        self.convr2 = nn.Conv2d(inner, hidden, (5, 1), padding=(2, 0))
        self.convq2 = nn.Conv2d(inner, hidden, (5, 1), padding=(2, 0))

    def with_context(self, q: Tensor) -> tuple[HalfStep, HalfStep]:
        """Return both half-steps for a context (N, Dc, h, w)."""
        return (
            self._half(q, self.convz1, self.convr1, self.convq1, (0, 2)),
            self._half(q, self.convz2, self.convr2, self.convq2, (2, 0)),
        )

    def _half(
        self, q: Tensor, z: nn.Conv2d, r: nn.Conv2d, c: nn.Conv2d, padding: tuple[int, int]
    ) -> HalfStep:
        require_weights(convz=z, convr=r, convq=c)
        weight = torch.cat((z.weight, r.weight, c.weight))
        assert z.bias is not None
        assert r.bias is not None
        assert c.bias is not None
        a, b = self.hidden, self.hidden + self.context
        constant = F.conv2d(q, weight[:, a:b], torch.cat((z.bias, r.bias, c.bias)), padding=padding)
        moving = torch.cat((weight[:, :a], weight[:, b:]), dim=1)
        n = 2 * self.hidden
        return HalfStep(moving[:n], moving[n:], constant[:, :n], constant[:, n:], padding)


class FlowHead(nn.Module):
    """The layers from the hidden state to a change of the flow."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(hidden, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2, 3, padding=1)

    def forward(self, hid: Tensor) -> Tensor:
        delta: Tensor = self.conv2(F.relu(self.conv1(hid)))
        return delta


class Attention(nn.Module):
    r"""Attention of each place to all places, by context: $\mathrm{softmax}(Q^\top K)$."""

    def __init__(self, context: int) -> None:
        super().__init__()
        self.to_qk = nn.Conv2d(context, 2 * context, 1, bias=False)

    def forward(self, context: Tensor) -> Tensor:
        """Return (N, hw, hw), every row a distribution over all places."""
        Q, K = self.to_qk(context).flatten(2).chunk(2, dim=1)
        return torch.softmax(Q.mT @ K / Q.shape[1] ** 0.5, dim=-1)


class Aggregate(nn.Module):
    r"""Global motion aggregation (Jiang et al., 2021): $m + \gamma A V m$."""

    def __init__(self, motion: int) -> None:
        super().__init__()
        self.to_v = nn.Conv2d(motion, motion, 1, bias=False)
        self.gamma = nn.Parameter(torch.zeros(1))

    def forward(self, A: Tensor, motion: Tensor) -> Tensor:
        aggregate: Tensor = self.to_v(motion).flatten(2) @ A.mT
        return motion + self.gamma * aggregate.view(motion.shape)


class Injection(NamedTuple):
    """The contribution of an image pair to every evaluation of f."""

    correlation: Any  # callable: coordinates (N, 2, h, w) -> (N, planes, h, w)
    halves: tuple[HalfStep, HalfStep]
    attention: Tensor | None


class UpdateBlock(nn.Module):
    r"""The map whose fixed point is the flow.

    $$m = \mathrm{motion}(C(c_0 + f), f), \quad h \leftarrow \mathrm{GRU}(h, [q, m]), \quad
    f \leftarrow f + \mathrm{head}(h)$$

    The state is the hidden state h (N, Dh, h, w) and the flow f (N, 2, h, w), in pixels of the
    grid.

    Args:
        planes: channels of the correlation lookup.
        hidden: channels of h and of the context.
        corr: channels of the two convolutions on correlations.
        flow: channels of the two convolutions on the flow.
        motion: features of the motion encoder.
        head: width of the flow head.
        gma: whether to aggregate motion over the image.
        all_grad: whether gradients pass through the flow that f receives.
        offsets: what the GRU gets beside the motion features.
    """

    def __init__(
        self,
        *,
        planes: int,
        hidden: int,
        corr: tuple[int, int],
        flow: tuple[int, int],
        motion: int,
        head: int,
        gma: bool,
        all_grad: bool,
        offsets: Offsets | None = None,
    ) -> None:
        super().__init__()
        self.all_grad, self.offsets = all_grad, offsets
        self.encoder = MotionEncoder(planes, corr, flow, motion)
        further = 0 if offsets is None else 3 * offsets.levels
        self.gru = SepConvGRU(hidden, hidden, (2 * motion if gma else motion) + further)
        self.flow_head = FlowHead(hidden, head)
        self.gma = Aggregate(motion) if gma else None

    def forward(self, hid: Tensor, flow: Tensor, given: Injection) -> tuple[Tensor, Tensor]:
        """Return f of a state."""
        if not self.all_grad:
            flow = flow.detach()
        dtype = self.encoder.convc1.weight.dtype
        corr = given.correlation(pixel_grid(flow) + flow)
        m = self.encoder(corr.to(dtype), flow.to(dtype))
        if self.gma is not None:
            m = torch.cat((m, self.gma(given.attention, m)), dim=1)
        if self.offsets is not None:
            m = torch.cat((m, self.offsets(corr.to(dtype))), dim=1)
        hid = hid.to(dtype)
        for half in given.halves:
            hid = half(hid, m)
        return hid, flow + self.flow_head(hid).to(flow.dtype)


def pixel_grid(like: Tensor) -> Tensor:
    """Return (1, 2, h, w): x and y of every place of `like` (N, ..., h, w)."""
    h, w = like.shape[-2:]
    y, x = torch.meshgrid(
        torch.arange(h, dtype=like.dtype, device=like.device),
        torch.arange(w, dtype=like.dtype, device=like.device),
        indexing="ij",
    )
    return torch.stack((x, y))[None]


def convex_upsample(flow: Tensor, mask: Tensor) -> Tensor:
    """Return a flow (N, 2, h, w) at 8 times the size: every pixel is a mean of nine flows.

    Masks of fewer than 8 rows and columns in a cell give a flow of fewer pixels, which a bilinear
    resize brings to 8 times the size.

    Args:
        flow: in pixels of the grid.
        mask: (N, 9 * c * c, h, w) logits of the weights: neighbour, then row and column in the
            cell.
    """
    N, _, h, w = flow.shape
    c = isqrt(mask.shape[1] // 9)
    with torch.autocast(flow.device.type, enabled=False):  # half precision has steps of pixels
        weight = mask.view(N, 9, c, c, h, w).softmax(1)
        near = F.unfold(STRIDE * flow, 3, padding=1).view(N, 2, 9, h, w)
        up = torch.einsum("nkrshw,nckhw->nchrws", weight, near.to(weight.dtype))
        up = up.reshape(N, 2, c * h, c * w)
        if c < STRIDE:
            up = F.interpolate(up, size=(STRIDE * h, STRIDE * w), mode="bilinear")
    return up
