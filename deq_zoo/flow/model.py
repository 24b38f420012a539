"""DEQ-Flow: two frames to the optical flow between them, as a fixed point (Bai et al., 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deq_zoo.errors import DataError
from deq_zoo.flow.config import STRIDE, FlowConfig
from deq_zoo.flow.correlation import SMALLEST, correlate, planes
from deq_zoo.flow.layers import Attention, Encoder, Injection, UpdateBlock, convex_upsample
from deq_zoo.flow.offsets import Offsets
from deq_zoo.flow.trunk import Trunk
from deq_zoo.images.inputs import ImageLike, as_image
from deq_zoo.model import Model
from deq_zoo.output import Output
from torchdeq import DEQConfig, apply_norm, get_deq, reset_norm

SETTLED = 0.5  # pixels: a flow that one evaluation of f changes by more has not settled
Side = Literal["both", "bottom"]


class State(NamedTuple):
    """The state of a solve: hidden state (N, Dh, h, w) and flow (N, 2, h, w) on the grid."""

    hid: Tensor
    flow: Tensor


@dataclass(frozen=True)
class FlowPrediction(Output[Tensor, State]):
    """The flow from one image to another, as `DEQFlow.predict` returns it.

    Args:
        predictions: one flow (2, H, W) in pixels, x first, on the CPU.
        state: the equilibrium; a `z0` for another pair of the same size. For the next pair of a
            video, move it along first: `deq_zoo.flow.video.carried(state)`.
        stats: statistics of the solve.
        change: root mean square over the grid, in pixels, of what one more evaluation of f changes.
    """

    change: float = 0.0

    @property
    def settled(self) -> bool:
        """Return whether one more evaluation changes the flow by half a pixel at most."""
        return self.change <= SETTLED  # False for NaN


class DEQFlow(Model):
    r"""Optical flow as the fixed point of a recurrent update.

    $$(h^\star, f^\star) = \mathrm{update}(h^\star, f^\star; q, C), \qquad
    q = \mathrm{relu}(\mathrm{cnet}(I_1))$$

    with C the correlation of the features of both frames, f in pixels of a grid with an eighth of
    the image's sides. A learnt convex combination brings f to full size.

    Shapes: images are (N, 3, H, W), bytes or floats from 0 to 255, of any size: the model pads them
    by repeating their borders, and crops the flow.

    Args:
        config: the shape of the network.
        deq: options of the DEQ and of the norm in f: a `DEQConfig`, dict or Namespace.
    """

    def __init__(self, config: FlowConfig, deq: Any = None) -> None:
        super().__init__()
        self.config = config
        options, w = DEQConfig(deq), config.widths
        instance, batch = partial(nn.InstanceNorm2d, affine=False), nn.BatchNorm2d
        if w.trunk:
            self.trunk = Trunk(w.features, w.hidden, w.encoder, config.dropout)
        else:
            self.fnet = Encoder(w.features, instance, w.encoder, config.dropout)
            self.cnet = Encoder(w.hidden, batch, w.encoder, config.dropout)
        self.update_block = UpdateBlock(
            planes=planes(w.levels, w.radius),
            hidden=w.hidden,
            corr=w.corr,
            flow=w.flow,
            motion=w.motion,
            head=config.head,
            gma=config.gma,
            all_grad=config.all_grad,
            offsets=Offsets(w.levels, w.radius) if w.offsets else None,
        )
        self.mask = nn.Sequential(
            nn.Conv2d(w.hidden, w.mask, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(w.mask, 9 * w.cell * w.cell, 1),
        )
        self.attn = Attention(w.hidden) if config.gma else None
        self.deq = get_deq(options, coupled=options.get("coupled", False))
        apply_norm(self.update_block, args=options)

    def forward(
        self,
        x: tuple[Tensor, Tensor],
        z0: State | Tensor | None = None,
        pad: Side = "both",
        **call: Any,
    ) -> Output[Tensor, State]:
        """Return flows (N, 2, H, W) in pixels: one in evaluation, all sampled ones in training.

        Args:
            x: both frames; the flow leads from pixels of the first to pixels of the second.
            z0: a state to start from, e.g. `deq_zoo.flow.video.carried(state)`, or a flow on the
                grid alone; zeros by default.
            pad: rows that sides of no multiple of 8 need come on `both` sides, or at the
                `bottom`, which suits KITTI's sky.
            **call: options of this call of the DEQ, e.g. `f_max_iter=12`.
        """
        return self._solve(self._first_state(x[0], z0, pad), self.inject(*x, pad),
                           self.box(x[0], pad), **call)  # fmt: skip

    def predict(
        self,
        x: tuple[ImageLike, ImageLike],
        z0: State | Tensor | None = None,
        pad: Side = "both",
        **call: Any,
    ) -> FlowPrediction:
        """Return the flow from one image to another of the same size.

        The solve has the budget of evaluation, by which training chose the best checkpoint. One
        more evaluation of f measures whether the flow has settled.

        Args:
            x: the first and the second image, each a path, a Pillow image, an array (H, W, 3) or a
                tensor (3, H, W); bytes, or floats from 0 to 1. Grey images work, too.
            z0: see `forward`.
            pad: see `forward`.
            **call: options of this call of the DEQ, e.g. `f_max_iter=12`.
        """
        prediction = super().predict(x, z0, pad=pad, **call)
        assert isinstance(prediction, FlowPrediction)
        return prediction

    def _predict(
        self, x: Any, z0: State | Tensor | None, pad: Side = "both", **call: Any
    ) -> FlowPrediction:
        image1, image2 = (image[None].to(self.device) for image in _as_pair(x))
        given = self.inject(image1, image2, pad)
        first = self._first_state(image1, z0, pad)
        out = self._solve(first, given, self.box(image1, pad), **call)
        flow = out.prediction[0].float().cpu()
        return FlowPrediction([flow], out.state, out.stats, self.change(out.state, given))

    def _first_state(self, image: Tensor, z0: State | Tensor | None, pad: Side) -> State:
        zeros = self.zero_state(image, pad)
        if z0 is None:
            return zeros
        state = State(zeros.hid, z0) if isinstance(z0, Tensor) else z0
        _check_state(state, zeros)
        return state

    def _solve(
        self, z0: State, given: Injection, box: tuple[slice, slice], **call: Any
    ) -> Output[Tensor, State]:
        states, stats = self.deq(self.update_block, tuple(z0), args=(given,), **call)
        flows = [self.decode(State(*z))[..., box[0], box[1]] for z in states]
        return Output(flows, State(*(t.detach() for t in states[-1])), stats)

    def shard_units(self) -> tuple[nn.Module, ...]:
        """Return the encoders, which end before the solve begins."""
        return (self.trunk,) if self.config.widths.trunk else (self.fnet, self.cnet)

    def change(self, state: State, given: Injection) -> float:
        """Return the root mean square change of the flow in one evaluation of f, in pixels."""
        _, flow = self.update_block(*state, given)
        return STRIDE * float((flow - state.flow).square().sum(1).mean().sqrt())

    def inject(self, image1: Tensor, image2: Tensor, pad: Side = "both") -> Injection:
        """Return what a pair of images adds to every evaluation of f.

        It computes the normalised weights of f, too.
        """
        if image1.shape != image2.shape:  # padded, they might agree by chance
            raise ValueError(
                f"both frames must have one size, got {tuple(image1.shape)} and "
                f"{tuple(image2.shape)}"
            )
        a, b = self._normalise(image1, pad), self._normalise(image2, pad)
        reset_norm(self.update_block)
        fmap1, fmap2, context = self._encode(a, b)
        w = self.config.widths
        return Injection(
            correlate(fmap1, fmap2, self.config.correlation, w.levels, w.radius),
            self.update_block.gru.with_context(context),
            None if self.attn is None else self.attn(context),
        )

    def _encode(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the features of both frames and the context of the first."""
        n = a.shape[0]
        if self.config.widths.trunk:
            shared = self.trunk(torch.cat((a, b)))
            features, context = self.trunk.features(shared), self.trunk.to_context(shared[:n])
        else:
            features, context = self.fnet(torch.cat((a, b))), self.cnet(a)
        return features[:n], features[n:], F.relu(context)

    def zero_state(self, image: Tensor, pad: Side = "both") -> State:
        """Return a state of zeros for the size of an image, in single precision at least."""
        N = image.shape[0]
        top, bottom, left, right = self._margins(image, pad)
        h = (image.shape[2] + top + bottom) // STRIDE
        w = (image.shape[3] + left + right) // STRIDE
        dtype = torch.promote_types(next(self.parameters()).dtype, torch.float32)
        hid = torch.zeros(N, self.config.widths.hidden, h, w, dtype=dtype, device=image.device)
        return State(hid, hid.new_zeros(N, 2, h, w))

    def decode(self, state: State) -> Tensor:
        """Return the flow of a state at full size (N, 2, 8 h, 8 w), in pixels."""
        mask = 0.25 * self.mask(state.hid.to(next(self.mask.parameters()).dtype))
        return convex_upsample(state.flow, mask.to(torch.promote_types(mask.dtype, torch.float32)))

    def box(self, image: Tensor, pad: Side = "both") -> tuple[slice, slice]:
        """Return the rows and columns of an image within its padded form."""
        top, _, left, _ = self._margins(image, pad)
        return slice(top, top + image.shape[2]), slice(left, left + image.shape[3])

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.config.freeze_bn:
            for module in self.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()
        return self

    def _normalise(self, image: Tensor, pad: Side) -> Tensor:
        top, bottom, left, right = self._margins(image, pad)
        x = 2 * image.to(next(self.parameters()).dtype) / 255 - 1
        return F.pad(x, (left, right, top, bottom), mode="replicate")

    @staticmethod
    def _margins(image: Tensor, pad: Side) -> tuple[int, int, int, int]:
        """Return the rows and columns to add: top, bottom, left, right."""
        if image.dim() != 4 or image.shape[1] != 3 or not min(image.shape[2:]):
            raise ValueError(f"images must be (batch, 3, height, width), got {tuple(image.shape)}")
        if pad not in ("both", "bottom"):
            raise ValueError(f"pad is both or bottom, got {pad!r}")
        rows, columns = (max(-size % STRIDE, STRIDE * SMALLEST - size) for size in image.shape[2:])
        top = rows // 2 if pad == "both" else 0
        return top, rows - top, columns // 2, columns - columns // 2


def _as_pair(x: Any) -> list[Tensor]:
    """Return two images as bytes (3, H, W); raise if `x` is not a pair of one size."""
    if isinstance(x, (str, bytes)) or not hasattr(x, "__len__") or len(x) != 2:
        raise TypeError(
            "flow leads from one image to another: give a pair (image1, image2), got "
            f"{type(x).__name__}"
        )
    images = [as_image(image) for image in x]
    sizes = [tuple(image.shape[1:]) for image in images]
    if sizes[0] != sizes[1]:
        raise DataError(
            f"both images must have one size, got {sizes[0]} and {sizes[1]}, as height and width"
        )
    return images


def _check_state(state: State, zeros: State) -> None:
    got, want = ([tuple(each.shape) for each in each_state] for each_state in (state, zeros))
    if got != want:
        raise ValueError(
            f"z0 for these images has hidden state and flow of shapes {want}, got {got}: begin "
            "without z0 when the size or the number of images changes"
        )
