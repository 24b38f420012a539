"""Weights of the authors' DEQ-INR, in and out.

The names are ours. Theirs hold a constant besides, `f.z_init`, from which the first filter is
made: zeros for siren_like, ones for the others. Newer weight norms call g and v `original0` and
`original1`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from deq_zoo.errors import CheckpointError
from deq_zoo.inr.model import Field
from deq_zoo.weights import check_fits

_CONSTANT = "f.z_init"
_NEWER = {
    ".parametrizations.weight.original0": ".weight_g",
    ".parametrizations.weight.original1": ".weight_v",
}


def from_authors(field: Field, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state_dict of the authors as one of `field`, which is not changed."""
    found = {_renamed(key): value.detach().clone() for key, value in state.items()}
    constant = found.pop(_CONSTANT, None)
    filter = getattr(getattr(field, "config", None), "filter", None)
    if constant is not None and not bool((constant == (filter != "siren_like")).all()):
        raise CheckpointError(
            f"{_CONSTANT} of these weights does not belong to the filter {filter!r}: it is zero "
            "for siren_like and one for fourier and gabor; build the field with theirs"
        )
    advice = "Build the field with the authors' filter, width, layers, coordinates and channels"
    check_fits(found, field.state_dict(), "the state_dict", advice)
    return found


def to_authors(field: Field) -> dict[str, Tensor]:
    """The weights of an equilibrium field as the authors' programs read them."""
    state = {key: value.detach().clone() for key, value in field.state_dict().items()}
    if hasattr(field, "f"):
        filter, width = field.config.filter, field.config.width  # type: ignore[union-attr]
        like = next(iter(state.values()))
        state[_CONSTANT] = torch.full_like(like, float(filter != "siren_like")).flatten()[:1]
        state[_CONSTANT] = state[_CONSTANT].repeat(1, width)
    return state


def _renamed(key: str) -> str:
    for newer, name in _NEWER.items():
        key = key.replace(newer, name)
    return key
