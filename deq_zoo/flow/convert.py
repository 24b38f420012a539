"""Checkpoints of the authors' DEQ-Flow, in and out.

Their residual blocks list one normalisation twice, as `norm3` and as `downsample.1`; ours has
it once.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from deq_zoo.errors import CheckpointError

_TWIN, _KEPT = ".downsample.1.", ".norm3."


def from_authors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state_dict of the authors' as one of ours, in single precision at least."""
    kept = dict[str, Tensor]()
    for key, value in state.items():
        if _TWIN not in key:
            exact = torch.promote_types(value.dtype, torch.float32)
            kept[key] = value.to(exact) if value.is_floating_point() else value
            continue
        twin = state.get(key.replace(_TWIN, _KEPT))
        if twin is not None and not torch.equal(twin, value):
            raise CheckpointError(
                f"{key} and {key.replace(_TWIN, _KEPT)} are one tensor in the authors' files, but "
                "differ here"
            )
        if twin is None:
            kept[key.replace(_TWIN, _KEPT)] = value
    return kept


def to_authors(state: Mapping[str, Tensor], data_parallel: bool = True) -> dict[str, Tensor]:
    """A state_dict of ours as the authors' programs read it.

    Args:
        state: ours.
        data_parallel: let the keys start with `module.`, as in their files.
    """
    written = dict[str, Tensor]()
    for key, value in state.items():
        written[key] = value
        if _KEPT in key:
            written[key.replace(_KEPT, _TWIN)] = value
    prefix = "module." if data_parallel else ""
    return {prefix + key: value.detach().clone() for key, value in written.items()}
