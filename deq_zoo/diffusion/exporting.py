"""The step network of a diffusion model for other programs; the chain around it is theirs."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deq_zoo.diffusion.model import Denoiser
from deq_zoo.exportable import Exportable

_BEFORE = (
    "`images` are noisy images, of which a clean one has values from -1 to 1; `timesteps` are "
    "their noise levels, from 0 to facts.noise_levels - 1."
)
_AFTER = (
    "`prediction` is the noise in the images, or v if facts.prediction says so. One step of a "
    "chain is one call; the equilibrium of DEQ-DDIM is the whole chain, whose solver calls this "
    "network with all steps as one batch."
)


class Step(nn.Module):
    """The averaged network of a denoiser, which returns its prediction."""

    def __init__(self, model: Denoiser) -> None:
        super().__init__()
        self.net = _with_open_batch(deepcopy(model.average.module))

    def forward(self, images: Tensor, timesteps: Tensor) -> dict[str, Tensor]:
        return {"prediction": self.net(images, timesteps).sample}


class Doubling(nn.Module):
    """Images of twice the size under a convolution, as in `Upsample2D` of diffusers.

    The original asks whether the batch exceeds 63, by which an exported program would be limited.
    """

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, size: Any = None) -> Tensor:
        double = {"scale_factor": 2.0} if size is None else {"size": size}
        up: Tensor = self.conv(F.interpolate(x, mode="nearest", **double))
        return up


def _with_open_batch(net: nn.Module) -> nn.Module:
    """Return a network whose upsampling takes batches of every size; it changes `net`."""
    for module in list(net.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ == "Upsample2D":
                setattr(module, name, Doubling(child.conv))  # type: ignore[arg-type]
    return net


def make_export(model: Denoiser, facts: Mapping[str, Any]) -> Exportable:
    """Return the step network of a denoiser as other programs call it."""
    rng, c = torch.Generator().manual_seed(0), model.config
    images = torch.randn(2, c.channels, c.size, c.size, generator=rng)
    return Exportable(
        Step(model),
        {"images": images, "timesteps": torch.tensor([3, 40])},
        {
            "images": "noisy images",
            "timesteps": "noise level of each",
            "prediction": "noise, or v",
        },
        _BEFORE,
        _AFTER,
        facts,
        solves=False,
    )
