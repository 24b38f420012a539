"""Errors of a flow as the benchmarks count them, over many pairs of any sizes."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan

from torch import Tensor

NEAR = (1, 3, 5)  # pixels
LONGEST = 400.0  # pixels; longer flows count neither in training nor in a masked error
_FAR, _SHARE = 3.0, 0.05  # an outlier of KITTI is off by more than both


def endpoint_error(flow: Tensor, truth: Tensor) -> Tensor:
    """Return the distance (..., H, W) between flows (..., 2, H, W), in pixels."""
    return (flow - truth).square().sum(-3).sqrt()


@dataclass
class FlowScores:
    """Sums of errors over pairs: `add` pairs one by one, then read the means.

    Means over pixels pool the pixels of all images. `aepe_by_image` is KITTI's: the mean over
    images of each image's mean. Pixels without a valid flow never count, and a mean over nothing
    is NaN. `aepe_masked` is FlyingThings3D's: invalid and extreme flows count as errors of 0.
    """

    pixels: int = 0
    images: int = 0
    area: int = 0  # pixels, valid or not
    error: float = 0.0
    error_masked: float = 0.0
    by_image: float = 0.0
    outliers: int = 0
    near: tuple[int, ...] = (0,) * len(NEAR)

    def add(self, flow: Tensor, truth: Tensor, valid: Tensor | None = None) -> None:
        """Add one pair: flows (2, H, W) and where the true flow is valid (H, W)."""
        if flow.shape != truth.shape or flow.dim() != 3:
            raise ValueError(
                "both flows must be (2, height, width), got "
                f"{tuple(flow.shape)} and {tuple(truth.shape)}"
            )
        flow, truth = flow.double(), truth.double()
        epe, size = endpoint_error(flow, truth), truth.square().sum(0).sqrt()
        self.area += epe.numel()
        if valid is not None:
            epe, size = epe[valid], size[valid]
        if not epe.numel():
            return
        self.images += 1
        self.pixels += epe.numel()
        self.error += float(epe.sum())
        self.error_masked += float(epe[size < LONGEST].sum())
        self.by_image += float(epe.mean())
        inliers = (epe <= _FAR) | (epe <= _SHARE * size)  # False for NaN
        self.outliers += epe.numel() - int(inliers.sum())
        counts = (int((epe < limit).sum()) for limit in NEAR)
        self.near = tuple(a + b for a, b in zip(self.near, counts, strict=True))

    @property
    def aepe(self) -> float:
        """Return the mean error over all pixels."""
        return _ratio(self.error, self.pixels)

    @property
    def aepe_masked(self) -> float:
        """Return the mean with an error of 0 where the flow is invalid, or 400 pixels or longer."""
        return _ratio(self.error_masked, self.area)

    @property
    def aepe_by_image(self) -> float:
        """Return the mean over images of their mean errors."""
        return _ratio(self.by_image, self.images)

    @property
    def f1_all(self) -> float:
        """Return the percentage of pixels off by more than 3 pixels and 5 % of the flow."""
        return 100 * _ratio(self.outliers, self.pixels)

    def within(self, limit: int) -> float:
        """Return the percentage of pixels with an error below 1, 3 or 5 pixels."""
        return 100 * _ratio(self.near[NEAR.index(limit)], self.pixels)

    def summary(self, prefix: str, sparse: bool = False, masked: bool = False) -> dict[str, float]:
        """Return the metrics that are usual for a set, by name.

        Args:
            prefix: the beginning of their names.
            sparse: whether the set is sparse, as KITTI.
            masked: whether to add the masked error of a dense set.
        """
        if sparse:
            return {f"{prefix}_aepe": self.aepe_by_image, f"{prefix}_f1": self.f1_all}
        near = {f"{prefix}_{limit}px": self.within(limit) for limit in NEAR}
        dense = {f"{prefix}_aepe": self.aepe, **near}
        return dense | {f"{prefix}_masked_aepe": self.aepe_masked} if masked else dense


def _ratio(total: float, count: int) -> float:
    return total / count if count else nan
