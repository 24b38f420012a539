"""DEQ-Flow: two frames to the optical flow between them, as a fixed point (Bai et al., 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Self, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deq_zoo.flow.correlation import PLANES, SMALLEST, Storage, correlate
from deq_zoo.flow.layers import Attention, Encoder, Injection, UpdateBlock, convex_upsample
from torchdeq import DEQConfig, SolverStat, apply_norm, get_deq, reset_norm
from torchdeq.registry import suggest

STRIDE = 8  # pixels of the image per place of the grid
Side = Literal["both", "bottom"]


class Widths(NamedTuple):
    """Channels of a size."""

    features: int  # Df
    hidden: int  # Dh, and of the context
    corr: tuple[int, int]
    flow: tuple[int, int]
    motion: int  # Dm
    encoder: tuple[int, int, int] = (64, 96, 128)
    mask: int = 256


#: The published sizes, and `nano`, which suits a processor.
SIZES = {
    "nano": Widths(32, 32, (64, 48), (32, 16), 32, encoder=(16, 24, 32), mask=64),
    "tiny": Widths(64, 32, (64, 48), (32, 16), 32),
    "base": Widths(256, 128, (256, 192), (128, 64), 128),
    "large": Widths(256, 192, (384, 288), (192, 96), 192),
    "huge": Widths(256, 256, (512, 384), (256, 128), 256),
    "gigantic": Widths(256, 384, (640, 480), (320, 160), 320),
}


@dataclass(frozen=True, kw_only=True)
class FlowConfig:
    """The shape of a DEQ-Flow.

    Args:
        size: nano, tiny, base (B), large, huge (H) or gigantic.
        gma: whether motion is aggregated over the whole image.
        narrow_head: cap the flow head's width at 256, as in the first release.
        dropout: share of the features' channels that training drops.
        all_grad: whether gradients pass through the flow that f is given; matters if several steps
            are differentiated.
        freeze_bn: keep the context encoder's batch statistics as they are; its scales still train.
        correlation: `volume` keeps all correlations, `on_demand` none, which takes longer;
            `auto` keeps them up to 1 GiB.
    """

    size: str = "base"
    gma: bool = False
    narrow_head: bool = False
    dropout: float = 0.0
    all_grad: bool = False
    freeze_bn: bool = False
    correlation: Storage = "auto"

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise ValueError(f"unknown size {self.size!r}{suggest(self.size, SIZES)}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {self.dropout}")
        if self.correlation not in get_args(Storage):
            raise ValueError(
                f"correlation is one of {', '.join(get_args(Storage))}, got {self.correlation!r}"
            )

    @property
    def widths(self) -> Widths:
        """Its channels."""
        return SIZES[self.size]

    @property
    def head(self) -> int:
        """Width of the flow head."""
        wide = 2 * self.widths.motion
        return min(256, wide) if self.narrow_head else wide


class State(NamedTuple):
    """Where a solve starts and ends: hidden state (N, Dh, h, w), flow (N, 2, h, w) on the grid."""

    hid: Tensor
    flow: Tensor


class FlowOutput(NamedTuple):
    """What the model says of a batch of pairs.

    Args:
        flows: (N, 2, H, W) in pixels, x first: one in evaluation, all samples in training.
        state: the last state, to start the next solve from; without a graph.
        stats: of the solve.
    """

    flows: list[Tensor]
    state: State
    stats: SolverStat


class DEQFlow(nn.Module):
    r"""Optical flow as the fixed point of a recurrent update.

    $$(h^\star, f^\star) = \mathrm{update}(h^\star, f^\star; q, C), \qquad
    q = \mathrm{relu}(\mathrm{cnet}(I_1))$$

    with C the correlation of the features of both frames, f in pixels of a grid with an eighth of
    the image's sides. A learnt convex combination brings f to full size.

    Shapes: images are (N, 3, H, W), bytes or floats from 0 to 255, of any size: they are padded by
    repeating their borders, and the flow is cropped.

    Args:
        config: the shape of the network.
        deq: options of the DEQ and of the norm in f: a `DEQConfig`, dict or Namespace.
    """

    def __init__(self, config: FlowConfig, deq: Any = None) -> None:
        super().__init__()
        self.config = config
        options, w = DEQConfig(deq), config.widths
        instance, batch = partial(nn.InstanceNorm2d, affine=False), nn.BatchNorm2d
        self.fnet = Encoder(w.features, instance, w.encoder, config.dropout)
        self.cnet = Encoder(w.hidden, batch, w.encoder, config.dropout)
        self.update_block = UpdateBlock(
            planes=PLANES,
            hidden=w.hidden,
            corr=w.corr,
            flow=w.flow,
            motion=w.motion,
            head=config.head,
            gma=config.gma,
            all_grad=config.all_grad,
        )
        self.mask = nn.Sequential(
            nn.Conv2d(w.hidden, w.mask, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(w.mask, 9 * STRIDE * STRIDE, 1),
        )
        self.attn = Attention(w.hidden) if config.gma else None
        self.deq = get_deq(options, coupled=options.get("coupled", False))
        apply_norm(self.update_block, args=options)

    def forward(
        self,
        image1: Tensor,
        image2: Tensor,
        start: State | Tensor | None = None,
        pad: Side = "both",
        **call: Any,
    ) -> FlowOutput:
        """The flow from one frame to the next.

        Args:
            image1: the frame whose pixels are followed.
            image2: the frame they are found in.
            start: where to start, e.g. `deq_zoo.flow.video.carried`, or a flow on the grid
                alone; zeros by default.
            pad: rows that sides of no multiple of 8 need come on `both` sides, or at the
                `bottom`, which KITTI's sky prefers.
            **call: options of this call of the DEQ, e.g. `f_max_iter=12`.
        """
        box = self.box(image1, pad)
        z0 = self.start(image1, pad)
        if isinstance(start, Tensor):
            start = State(z0.hid, start)
        if start is not None:
            _check_start(start, z0)
            z0 = start
        given = self.inject(image1, image2, pad)
        states, stats = self.deq(self.update_block, tuple(z0), args=(given,), **call)
        flows = [self.decode(State(*z))[..., box[0], box[1]] for z in states]
        return FlowOutput(flows, State(*(t.detach() for t in states[-1])), stats)

    def inject(self, image1: Tensor, image2: Tensor, pad: Side = "both") -> Injection:
        """What a pair of images adds to every evaluation of f; computes normalised weights."""
        if image1.shape != image2.shape:  # padded, they might agree by chance
            raise ValueError(
                f"both frames must have one size, got {tuple(image1.shape)} and "
                f"{tuple(image2.shape)}"
            )
        a, b = self._ready(image1, pad), self._ready(image2, pad)
        reset_norm(self.update_block)
        fmap1, fmap2 = self.fnet(torch.cat((a, b))).chunk(2)
        context = F.relu(self.cnet(a))
        return Injection(
            correlate(fmap1, fmap2, self.config.correlation),
            self.update_block.gru.with_context(context),
            None if self.attn is None else self.attn(context),
        )

    def start(self, image: Tensor, pad: Side = "both") -> State:
        """Zeros for an image's size, in single precision at least."""
        N = len(image)
        top, bottom, left, right = self._margins(image, pad)
        h = (image.shape[2] + top + bottom) // STRIDE
        w = (image.shape[3] + left + right) // STRIDE
        dtype = torch.promote_types(next(self.parameters()).dtype, torch.float32)
        hid = torch.zeros(N, self.config.widths.hidden, h, w, dtype=dtype, device=image.device)
        return State(hid, hid.new_zeros(N, 2, h, w))

    def decode(self, state: State) -> Tensor:
        """Flow at full size (N, 2, 8 h, 8 w), in pixels."""
        mask = 0.25 * self.mask(state.hid.to(next(self.mask.parameters()).dtype))
        return convex_upsample(state.flow, mask.to(torch.promote_types(mask.dtype, torch.float32)))

    def box(self, image: Tensor, pad: Side = "both") -> tuple[slice, slice]:
        """The rows and columns that an image takes when padded."""
        top, _, left, _ = self._margins(image, pad)
        return slice(top, top + image.shape[2]), slice(left, left + image.shape[3])

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.config.freeze_bn:
            for module in self.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()
        return self

    def _ready(self, image: Tensor, pad: Side) -> Tensor:
        top, bottom, left, right = self._margins(image, pad)
        x = 2 * image.to(next(self.parameters()).dtype) / 255 - 1
        return F.pad(x, (left, right, top, bottom), mode="replicate")

    @staticmethod
    def _margins(image: Tensor, pad: Side) -> tuple[int, int, int, int]:
        """Rows and columns to add: top, bottom, left, right."""
        if image.dim() != 4 or image.shape[1] != 3 or not min(image.shape[2:]):
            raise ValueError(f"images must be (batch, 3, height, width), got {tuple(image.shape)}")
        if pad not in ("both", "bottom"):
            raise ValueError(f"pad is both or bottom, got {pad!r}")
        rows, columns = (max(-size % STRIDE, STRIDE * SMALLEST - size) for size in image.shape[2:])
        top = rows // 2 if pad == "both" else 0
        return top, rows - top, columns // 2, columns - columns // 2


def _check_start(start: State, zero: State) -> None:
    got, want = ([tuple(each.shape) for each in state] for state in (start, zero))
    if got != want:
        raise ValueError(
            f"a start for these images has hidden state and flow of shapes {want}, got {got}: "
            "begin without one when the size or the number of images changes"
        )
