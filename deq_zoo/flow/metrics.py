"""Errors of a flow as the benchmarks count them, over many pairs of any sizes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

NEAR = (1, 3, 5)  # pixels
_FAR, _SHARE = 3.0, 0.05  # an outlier of KITTI is off by more than both


def endpoint_error(flow: Tensor, truth: Tensor) -> Tensor:
    """(..., H, W): the distance between flows (..., 2, H, W), in pixels."""
    return (flow - truth).square().sum(-3).sqrt()


@dataclass
class FlowScores:
    """Sums over pairs; ``add`` one after the other, then ask.

    Means over pixels pool all of them, whatever image they come from. ``aepe_by_image`` is KITTI's:
    the mean over images of each one's mean. Pixels without a known flow never count.
    """

    pixels: int = 0
    images: int = 0
    error: float = 0.0
    by_image: float = 0.0
    outliers: int = 0
    near: tuple[int, ...] = (0,) * len(NEAR)

    def add(self, flow: Tensor, truth: Tensor, valid: Tensor | None = None) -> None:
        """Take in one pair: flows (2, H, W) and where the truth is known (H, W)."""
        if flow.shape != truth.shape or flow.dim() != 3:
            raise ValueError(
                "both flows must be (2, height, width), got "
                f"{tuple(flow.shape)} and {tuple(truth.shape)}"
            )
        epe, size = endpoint_error(flow.double(), truth.double()), truth.double().square().sum(0)
        if valid is not None:
            epe, size = epe[valid], size[valid]
        if not epe.numel():
            return
        self.images += 1
        self.pixels += epe.numel()
        self.error += float(epe.sum())
        self.by_image += float(epe.mean())
        self.outliers += int(((epe > _FAR) & (epe > _SHARE * size.sqrt())).sum())
        found = (int((epe < limit).sum()) for limit in NEAR)
        self.near = tuple(a + b for a, b in zip(self.near, found, strict=True))

    @property
    def aepe(self) -> float:
        """The mean error over all pixels."""
        return self.error / max(1, self.pixels)

    @property
    def aepe_by_image(self) -> float:
        """The mean over images of their mean errors."""
        return self.by_image / max(1, self.images)

    @property
    def f1_all(self) -> float:
        """Percentage of pixels off by more than 3 pixels and 5 % of the flow."""
        return 100 * self.outliers / max(1, self.pixels)

    def within(self, limit: int) -> float:
        """Percentage of pixels with an error below 1, 3 or 5 pixels."""
        return 100 * self.near[NEAR.index(limit)] / max(1, self.pixels)

    def summary(self, prefix: str, sparse: bool = False) -> dict[str, float]:
        """The numbers that are usual for a dense, or for KITTI's sparse set."""
        if sparse:
            return {f"{prefix}_aepe": self.aepe_by_image, f"{prefix}_f1": self.f1_all}
        near = {f"{prefix}_{limit}px": self.within(limit) for limit in NEAR}
        return {f"{prefix}_aepe": self.aepe, **near}
