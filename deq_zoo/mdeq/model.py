"""MDEQ: images to a pyramid of features in equilibrium, and heads to classify and to segment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deq_zoo.images.inputs import ImageLike, as_image
from deq_zoo.mdeq.config import MDEQConfig
from deq_zoo.mdeq.layers import Bottleneck, MultiscaleMap, Pyramid, conv1x1, conv3x3, half, normed
from deq_zoo.mdeq.prediction import Classes, prepare
from deq_zoo.model import Model
from deq_zoo.output import Output
from deq_zoo.streaming import open_stream
from torchdeq import DEQConfig, FixedPoint, SolverStat, apply_norm, get_deq, reset_norm


class _Equilibrium(Model):
    """The common part of backbone, classifier and segmenter: stem, f and the DEQ."""

    def __init__(self, config: MDEQConfig, deq: Any = None) -> None:
        super().__init__()
        self.config = config
        options = DEQConfig(deq)
        c, times = config.channels[0], config.downsample_times
        self.downsample = nn.Sequential(
            *normed(conv3x3(config.in_channels, c, stride=2 if times >= 1 else 1)),
            *normed(conv3x3(c, c, stride=2 if times >= 2 else 1)),
        )
        self.stage0 = nn.Sequential(*normed(conv1x1(c, c))) if config.has_stage0 else nn.Identity()
        self.full_stage = MultiscaleMap(
            config.channels, config.blocks_by_branch, config.expansion, config.groups
        )
        self.deq = get_deq(options, coupled=options.get("coupled", False))
        for scope in config.norm_scope:
            if scope != "fuse_layers" or len(config.channels) > 1:  # one branch has none
                apply_norm(getattr(self.full_stage, scope), args=options)

    def inject(self, x: Tensor) -> Tensor:
        """Return the injection u, (B, C_0, H, W), of images (B, C, ...)."""
        if x.dim() != 4 or x.shape[1] != self.config.in_channels:
            raise ValueError(
                f"images must be (batch, {self.config.in_channels}, height, width), got "
                f"{tuple(x.shape)}"
            )
        if not x.is_floating_point():
            raise TypeError(f"images must be floating point, got {x.dtype}: normalise them first")
        u: Tensor = self.stage0(self.downsample(x))
        return u

    def start(self, u: Tensor) -> Pyramid:
        """Return a pyramid of zeros in the memory format of u and the dtype of the model."""
        dtype = next(self.parameters()).dtype  # u's own may be autocast's
        batch, _, height, width = u.shape
        pyramid = []
        for channels in self.config.channels:
            z = u.new_zeros((batch, channels, height, width), dtype=dtype)
            pyramid.append(z.contiguous(memory_format=_memory_format(u)))
            height, width = half(height), half(width)
        return pyramid

    def solve(
        self, u: Tensor, z0: Pyramid | None = None, **call: Any
    ) -> tuple[list[Pyramid], SolverStat]:
        """Return the pyramids in equilibrium with an injection, and statistics.

        Args:
            u: the injection.
            z0: where to start, e.g. the last frame's pyramid; zeros by default.
            **call: options of this call of the DEQ, e.g. `f_max_iter=30`, `compact=True`.
        """
        reset_norm(self.full_stage)
        states, stats = self.deq(
            self.full_stage, self.start(u) if z0 is None else z0, args=(u,), **call
        )
        return states, stats

    def solve_stream(
        self, injections: Iterable[Tensor], slots: int
    ) -> Iterator[FixedPoint[Pyramid]]:
        """Yield the pyramid in equilibrium with each injection, in evaluation mode.

        Images enter and leave a running batch: each costs the evaluations that it needs alone, and
        those of the next injection do not wait for the last ones of an injection.

        Args:
            injections: of batches of images, all of one size.
            slots: images that are solved at the same time.
        """
        reset_norm(self.full_stage)
        stream = open_stream(self.deq, self.full_stage, slots)
        batches = ((self.start(u), (u,)) for u in injections)
        yield from stream.solve_batches(batches, on_failure=self.deq.config.on_failure)

    def _initialise(self) -> None:
        """Draw the convolutions outside f by the config's rule; called when the head is there."""
        if self.config.init == "default":
            return
        inside = set(self.full_stage.modules())
        for module in self.modules():
            if isinstance(module, nn.Conv2d) and module not in inside:
                for parameter in module.parameters():
                    nn.init.normal_(parameter, std=0.01)


class MDEQ(_Equilibrium):
    r"""The backbone: images to the equilibrium pyramid of a multiscale map.

    $$z^\star = f(z^\star, u), \qquad u = \mathrm{stem}(x)$$

    Shapes: `x` is `(B, in_channels, H, W)`, of any size; branch i of a pyramid is
    `(B, C_i, H_i, W_i)` with sides halved `downsample_times + i` times, rounded up.

    Args:
        config: the shape of the network.
        deq: options of the DEQ and of the norm in f: a `DEQConfig`, dict or Namespace.
    """

    def __init__(self, config: MDEQConfig, deq: Any = None) -> None:
        super().__init__(config, deq)
        self._initialise()

    def forward(
        self, x: Tensor, z0: Pyramid | None = None, **call: Any
    ) -> Output[Pyramid, Pyramid]:
        """Return the pyramids that training samples, or the one of evaluation; see `solve`."""
        pyramids, stats = self.solve(self.inject(x), z0, **call)
        return Output(pyramids, _detached(pyramids[-1]), stats)


class MDEQClassifier(_Equilibrium):
    r"""An MDEQ that classifies images.

    $$t_0 = B_0(z_0), \quad t_{i+1} = B_{i+1}(z_{i+1}) +
    \mathrm{ReLU}(\mathrm{BN}(D_i \, t_i)), \quad
    y = W \, \mathrm{mean}(\mathrm{ReLU}(\mathrm{BN}(V t_{n-1})))$$

    with a bottleneck $B_i$ on each branch and strided convolutions $D_i$.

    Args: see `MDEQ`; the config must have `head_channels` and `final_channels`.
    """

    def __init__(self, config: MDEQConfig, deq: Any = None) -> None:
        super().__init__(config, deq)
        widths, final = config.head_channels, config.final_channels
        if len(widths) != len(config.channels) or final < 1 or min(widths) < 1:
            raise ValueError(
                f"a classifier of {len(config.channels)} branches needs as many head_channels and "
                f"final_channels >= 1, got {widths} and {final}"
            )
        self.incre_modules = nn.ModuleList(
            nn.Sequential(Bottleneck(c, h)) for c, h in zip(config.channels, widths, strict=True)
        )
        self.downsamp_modules = nn.ModuleList(
            nn.Sequential(*normed(conv3x3(4 * a, 4 * b, stride=2, bias=True)))
            for a, b in pairwise(widths)
        )
        self.final_layer = nn.Sequential(*normed(conv1x1(4 * widths[-1], final, bias=True)))
        self.classifier = nn.Linear(final, config.classes)
        self._initialise()

    def forward(self, x: Tensor, z0: Pyramid | None = None, **call: Any) -> Output[Tensor, Pyramid]:
        """Return the logits (B, classes) of every pyramid; see `solve`."""
        pyramids, stats = self.solve(self.inject(x), z0, **call)
        logits = [self.classify(z) for z in pyramids]
        return Output(logits, _detached(pyramids[-1]), stats)

    def predict(
        self, x: ImageLike, z0: Pyramid | None = None, **call: Any
    ) -> Output[Classes, Pyramid]:
        """Return the classes of one image: a path, a Pillow image, an array or a tensor.

        The image is brought into the form of the training images. A model of drawings on a dark
        ground inverts a drawing on a light one, and the other way round; the prediction says so.
        """
        return super().predict(x, z0, **call)

    def _predict(self, x: ImageLike, z0: Pyramid | None, **call: Any) -> Output[Classes, Pyramid]:
        image = prepare(as_image(x), self.facts)
        out = self(self.place(image.pixels), z0, **call)
        chance = out.prediction.float().softmax(1)[0]
        prediction = Classes.of(chance, self.facts.get("classes"), image.inverted, image.drawn)
        return Output([prediction], out.state, out.stats)

    def classify(self, z: Pyramid) -> Tensor:
        """Return the logits (B, classes) of a pyramid."""
        t = self.incre_modules[0](z[0])
        for i, down in enumerate(self.downsamp_modules, start=1):
            t = self.incre_modules[i](z[i]) + down(t)
        logits: Tensor = self.classifier(self.final_layer(t).mean(dim=(2, 3)))
        return logits


class MDEQSegmenter(_Equilibrium):
    """An MDEQ that labels every pixel: all branches at the finest one's size, two convolutions.

    Logits have the size of branch 0; resize them to the labels' for a loss.

    Args: see `MDEQ`.
    """

    def __init__(self, config: MDEQConfig, deq: Any = None) -> None:
        super().__init__(config, deq)
        width = sum(config.channels)
        self.last_layer = nn.Sequential(
            conv1x1(width, width, bias=True),
            nn.BatchNorm2d(width, momentum=0.01),
            nn.ReLU(inplace=True),
            conv1x1(width, config.classes, bias=True),
        )
        self._initialise()

    def forward(self, x: Tensor, z0: Pyramid | None = None, **call: Any) -> Output[Tensor, Pyramid]:
        """Return the logits (B, classes, H_0, W_0) of every pyramid."""
        pyramids, stats = self.solve(self.inject(x), z0, **call)
        logits = [self.segment(z) for z in pyramids]
        return Output(logits, _detached(pyramids[-1]), stats)

    def segment(self, z: Pyramid) -> Tensor:
        """Return the logits (B, classes, H_0, W_0) of a pyramid."""
        size = z[0].shape[2:]
        coarse = (
            F.interpolate(z_i, size=size, mode="bilinear", align_corners=True) for z_i in z[1:]
        )
        logits: Tensor = self.last_layer(torch.cat((z[0], *coarse), dim=1))
        return logits


def _detached(z: Pyramid) -> Pyramid:
    return [branch.detach() for branch in z]


def _memory_format(t: Tensor) -> torch.memory_format:
    last = t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format
