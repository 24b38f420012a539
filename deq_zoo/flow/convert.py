"""Checkpoints of the authors' DEQ-Flow, in and out.

Their residual blocks list one normalisation twice, as `norm3` and as `downsample.1`; ours list it
once. Their keys start with `module.`, as data-parallel training leaves them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from deq_zoo.errors import CheckpointError

_TWIN, _KEPT, _PREFIX = ".downsample.1.", ".norm3.", "module."


def from_authors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state_dict of the authors as one of ours, in single precision at least."""
    bare = {key.removeprefix(_PREFIX): value for key, value in state.items()}
    ours = dict[str, Tensor]()
    for key, value in bare.items():
        kept = key.replace(_TWIN, _KEPT)
        if kept != key and kept in bare:
            if not torch.equal(bare[kept], value):
                raise CheckpointError(
                    f"{key} and {kept} are one tensor in the authors' files, but differ here"
                )
            continue
        exact = torch.promote_types(value.dtype, torch.float32)
        ours[kept] = value.to(exact) if value.is_floating_point() else value
    return ours


def to_authors(state: Mapping[str, Tensor], data_parallel: bool = True) -> dict[str, Tensor]:
    """Return a state_dict of ours as the authors' programs read it.

    Args:
        state: ours.
        data_parallel: let the keys start with `module.`, as in their files.
    """
    prefix = _PREFIX if data_parallel else ""
    theirs = dict[str, Tensor]()
    for key, value in state.items():
        for name in dict.fromkeys((key, key.replace(_KEPT, _TWIN))):
            theirs[prefix + name] = value.detach().clone()
    return theirs
