"""Photographs that come with scikit-image and scikit-learn."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deq_zoo.packages import optional

_OF_SCIKIT_LEARN = ("china", "flower")


def photograph(name: str) -> Tensor:
    """Return the pixels (H, W, 1 or 3) of a photograph, as bytes."""
    if name in _OF_SCIKIT_LEARN:
        array = optional("sklearn.datasets", "flow", "photographs").load_sample_image(f"{name}.jpg")
    else:
        array = getattr(optional("skimage.data", "flow", "photographs"), name)()
    return torch.from_numpy(np.array(array)).view(*array.shape[:2], -1)
