"""Forward-backward consistency of flows: which pixels both frames show."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from deq_zoo.flow.layers import pixel_grid


def warped(image: Tensor, flow: Tensor) -> Tensor:
    """Return the second frame (N, C, H, W) as seen from the first: at x + flow(x), bilinear.

    Places outside the frame take the nearest pixel of its border.
    """
    if image.dim() != 4 or flow.shape != (len(image), 2, *image.shape[2:]):
        raise ValueError(
            "an image is (batch, channels, height, width) and its flow (batch, 2, height, width), "
            f"got {tuple(image.shape)} and {tuple(flow.shape)}"
        )
    size = flow.new_tensor([flow.shape[3], flow.shape[2]])[:, None, None]
    at = (2 * (pixel_grid(flow) + flow) + 1) / size - 1
    return F.grid_sample(
        image.to(flow.dtype), at.permute(0, 2, 3, 1), padding_mode="border", align_corners=False
    )


def consistent(
    forward: Tensor, backward: Tensor, share: float = 0.01, slack: float = 0.5
) -> Tensor:
    r"""Return (N, H, W): where the backward flow undoes the forward flow (Sundaram et al., 2010).

    $$|f + b|^2 \le \mathrm{share} \, (|f|^2 + |b|^2) + \mathrm{slack}, \qquad
    b = \mathrm{backward}(x + f(x))$$

    Elsewhere the second frame hides the pixel, the pixel has left the frame, or a flow is wrong.

    Args:
        forward: (N, 2, H, W) from the first frame to the second, in pixels.
        backward: from the second to the first.
        share: of the squared lengths, which the squared gap may have.
        slack: squared pixels, which the squared gap may have besides.
    """
    back = warped(backward, forward)
    gap, length = ((forward + back).square().sum(1), (forward**2 + back**2).sum(1))
    x, y = (pixel_grid(forward) + forward).unbind(1)
    height, width = forward.shape[2:]
    inside = (x >= 0) & (x <= width - 1) & (y >= 0) & (y <= height - 1)
    return inside & (gap <= share * length + slack)
