"""Photographs that come with scikit-image, scikit-learn and matplotlib."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deq_zoo.packages import optional

_OF_SCIKIT_LEARN = ("china", "flower")
_OF_MATPLOTLIB = ("grace_hopper",)


def photograph(name: str) -> Tensor:
    """Return the pixels (H, W, 1 or 3) of a photograph, as bytes."""
    if name in _OF_SCIKIT_LEARN:
        array = optional("sklearn.datasets", "flow", "photographs").load_sample_image(f"{name}.jpg")
    elif name in _OF_MATPLOTLIB:
        with optional("matplotlib.cbook", "flow", "photographs").get_sample_data(
            f"{name}.jpg"
        ) as file:
            array = np.asarray(optional("PIL.Image", "flow", "photographs").open(file))
    else:
        array = getattr(optional("skimage.data", "flow", "photographs"), name)()
    return torch.from_numpy(np.array(array)).view(*array.shape[:2], -1)
