"""Weights of the authors' IGNN, in and out: the names are ours, a few tensors are only theirs.

Their layers have a `bias` that no output depends on, their graph classifier likewise an `Omega_2`,
and their full-batch nets a start of zeros, `X_0`. `from_authors` drops these tensors; `to_authors`
writes `bias` and `Omega_2` as zeros.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from deq_zoo.errors import CheckpointError
from deq_zoo.weights import check_fits

POWER_STEPS = 15  # power iterations that replace an estimate of a spectral norm
_WHOLE = ("", "_orig", "_v")  # endings of the tensor with the shape of a weight, by norm


def read_sizes(state: Mapping[str, Tensor], ends: tuple[str, str]) -> tuple[int, int]:
    """Return features and classes of a network, from its weights alone.

    Args:
        state: a state_dict, ours or the authors'.
        ends: the first and the last weight of the network; see `IGNN.ends`.
    """
    first, last = (_weight(state, name) for name in ends)
    return first.shape[1], last.shape[0]


def from_authors(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state_dict of the authors as one of `model`, which is not changed.

    Where an estimate of a spectral norm is zero or negative, as in their nets before training, it
    is replaced, with a warning.
    """
    expected = model.state_dict()
    dropped = _only_theirs(expected).keys() | {key for key in state if key.endswith("X_0")}
    ours = {key: value.detach().clone() for key, value in state.items() if key not in dropped}
    advice = "Build the model with the authors' width, features, classes and norm_type"
    check_fits(ours, expected, "the state_dict", advice)
    replaced = [key for key in ours if key.endswith("_orig") and _replace_estimate(ours, key)]
    if replaced:
        warnings.warn(
            f"{len(replaced)} spectral norms were zero or negative, {replaced[0]} first: their "
            f"vectors were renewed by {POWER_STEPS} power iterations",
            stacklevel=2,
        )
    return ours


def to_authors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state_dict of ours as the authors' programs read it, without `X_0`."""
    return {key: value.detach().clone() for key, value in state.items()} | _only_theirs(state)


def _only_theirs(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return zeros for the tensors that the authors' network has beside a state_dict of ours."""
    added: dict[str, Tensor] = {}
    for key in state:
        layer, name, ending = key.partition("Omega_1")  # every implicit layer has one
        if not name or (layer and not layer.endswith(".")):
            continue
        W = _weight(state, f"{layer}W")
        added[f"{layer}bias"] = W.new_zeros(len(W), 1)
        if not any(other.startswith(f"{layer}Omega_2") for other in state):
            added[f"{layer}Omega_2{ending}"] = torch.zeros_like(state[key])
    return added


def _weight(state: Mapping[str, Tensor], name: str) -> Tensor:
    """Return the tensor with the shape of a weight, which a norm may have renamed."""
    matching = [state[name + ending] for ending in _WHOLE if name + ending in state]
    if not matching or matching[0].dim() != 2:
        some = ", ".join(list(state)[:5])
        raise CheckpointError(
            f"these are not the weights of this IGNN: there is no matrix {name}; there are {some}"
        )
    return matching[0]


def _replace_estimate(state: dict[str, Tensor], key: str) -> bool:
    """Renew u and v of a weight if they give a norm that is not positive; return whether so."""
    stem = key.removesuffix("_orig")
    W, u, v = state[key], state[f"{stem}_u"], state[f"{stem}_v"]
    if bool(u @ W @ v > 0) or not bool(W.any()):
        return False
    for _ in range(POWER_STEPS):
        v = torch.nn.functional.normalize(W.mT @ u, dim=0)
        u = torch.nn.functional.normalize(W @ v, dim=0)
    state[f"{stem}_u"], state[f"{stem}_v"] = u, v
    return True
