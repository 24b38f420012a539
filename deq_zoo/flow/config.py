"""The shape of a DEQ-Flow: its published sizes and their variants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, get_args

from deq_zoo.flow.correlation import LEVELS, RADIUS, Storage
from torchdeq.registry import suggest

STRIDE = 8  # pixels of the image per place of the grid


class Widths(NamedTuple):
    """The numbers of channels of a model size, and what its correlation sees."""

    features: int  # Df
    hidden: int  # Dh, and of the context
    corr: tuple[int, int]
    flow: tuple[int, int]
    motion: int  # Dm
    encoder: tuple[int, int, int] = (64, 96, 128)
    mask: int = 256
    levels: int = LEVELS
    radius: int = RADIUS
    trunk: bool = False  # one encoder for features and context, which never works at half the size
    offsets: bool = False  # whether the update gets the expected offset of the match
    cell: int = STRIDE  # rows and columns of flows that a place of the grid decodes to


#: The published sizes, and two that are small enough to train on a CPU.
SIZES = {
    "pocket": Widths(
        *(48, 40, (64, 40), (16, 16), 32),
        encoder=(24, 32, 48),
        mask=64,
        levels=3,
        radius=3,
        trunk=True,
        offsets=True,
        cell=4,
    ),
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
        size: pocket, nano, tiny, base (B), large, huge (H) or gigantic.
        gma: whether the model aggregates motion over the whole image.
        narrow_head: cap the flow head's width at 256, as in the first release.
        dropout: share of the features' channels that training drops.
        all_grad: whether gradients pass through the flow that f receives; matters if training
            differentiates several steps.
        freeze_bn: keep the batch statistics of the context encoder; its scales still train.
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
        if self.freeze_bn and self.widths.trunk:
            raise ValueError(f"freeze_bn has no effect: size {self.size} has no batch norm")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {self.dropout}")
        if self.correlation not in get_args(Storage):
            raise ValueError(
                f"correlation is one of {', '.join(get_args(Storage))}, got {self.correlation!r}"
            )

    @property
    def widths(self) -> Widths:
        """Return the numbers of channels."""
        return SIZES[self.size]

    @property
    def head(self) -> int:
        """Return the width of the flow head."""
        wide = 2 * self.widths.motion
        return min(256, wide) if self.narrow_head else wide
