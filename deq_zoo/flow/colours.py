"""Flow in colour, by the wheel of the Middlebury benchmark."""

from __future__ import annotations

from math import pi

import torch
from torch import Tensor

from deq_zoo.flow.formats import valid_mask

# Entries of each sixth of the wheel, and which channel (red, green, blue) rises or falls in it.
_SEGMENTS = ((15, 1, True), (6, 0, False), (4, 2, True), (11, 1, False), (13, 0, True))
_LAST = (6, 2, False)


def colour_wheel() -> Tensor:
    """Return (55, 3): red, yellow, green, cyan, blue, magenta and back, from 0 to 255."""
    colour = torch.tensor([255.0, 0.0, 0.0])
    entries = []
    for count, channel, rises in (*_SEGMENTS, _LAST):
        for k in range(count):
            ramp = (255 * k) // count
            colour[channel] = ramp if rises else 255 - ramp
            entries.append(colour.clone())
        colour[channel] = 255 if rises else 0
    return torch.stack(entries)


def flow_to_colour(flow: Tensor, largest: float | None = None) -> Tensor:
    """Return a flow (2, H, W) as an image (3, H, W): hue is direction, saturation is length.

    Args:
        flow: NaN, infinities and Middlebury's mark of an unknown flow become black.
        largest: length with full saturation, by default the longest; longer flows are dark.
    """
    if flow.dim() != 3 or flow.shape[0] != 2:
        raise ValueError(f"a flow is (2, height, width), got {tuple(flow.shape)}")
    valid = valid_mask(flow)
    u, v = torch.where(valid, flow, 0).double().cpu()
    length = (u.square() + v.square()).sqrt()
    longest = float(length.max()) if largest is None and length.numel() else largest or 0.0
    radius = length / (longest + 1e-5)
    wheel = colour_wheel().double() / 255
    place = (torch.atan2(-v, -u) / pi + 1) / 2 * (len(wheel) - 1)
    low = place.floor().long()
    high = (low + 1) % len(wheel)
    colour = torch.lerp(wheel[low], wheel[high], (place - low)[..., None])  # (H, W, 3)
    inside = 1 - radius[..., None] * (1 - colour)
    colour = torch.where(radius[..., None] <= 1, inside, 0.75 * colour)
    colour = torch.where(valid.cpu()[..., None], colour, 0)
    return (255 * colour).floor().byte().permute(2, 0, 1)
