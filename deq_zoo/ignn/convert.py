"""Weights of the authors' IGNN, in and out: the names are ours, a few tensors are only theirs.

Their layers hold a `bias` that nothing uses, their graph classifier an `Omega_2` likewise, and
their full-batch nets a start of zeros, `X_0`. These are left out, and written as zeros.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from deq_zoo.ignn.layers import ImplicitGraph
from deq_zoo.weights import check_fits

POWER_STEPS = 15  # enough to turn a meaningless estimate of a spectral norm into one


def from_authors(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state_dict of the authors as one of `model`, which is not changed.

    Where it would make a spectral norm zero or negative, as in their nets before training, the
    estimate is put right with a warning.
    """
    dropped = set(_only_theirs(model))
    found = {k: v.detach().clone() for k, v in state.items() if k not in dropped}
    found = {k: v for k, v in found.items() if not k.endswith("X_0")}
    advice = "Build the model with the authors' width, features, classes and norm_type"
    check_fits(found, model.state_dict(), "the state_dict", advice)
    mended = [key for key in found if key.endswith("_orig") and _mend(found, key)]
    if mended:
        warnings.warn(
            f"{len(mended)} spectral norms were zero or negative, {mended[0]} first: their vectors "
            f"were renewed by {POWER_STEPS} power iterations",
            stacklevel=2,
        )
    return found


def to_authors(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a model as the authors' programs read them, without `X_0`."""
    state = {key: value.detach().clone() for key, value in model.state_dict().items()}
    like = next(iter(state.values()))
    return state | {key: like.new_zeros(shape) for key, shape in _only_theirs(model).items()}


def _only_theirs(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what the authors' models hold and nothing depends on."""
    found: dict[str, tuple[int, ...]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, ImplicitGraph):
            prefix = f"{name}." if name else ""
            found[f"{prefix}bias"] = (layer.out_features, 1)
            if layer.Omega_2 is None:  # its parts under a norm are those of its twin
                twin = {k: v for k, v in layer.state_dict().items() if k.startswith("Omega_1")}
                for key, value in twin.items():
                    found[prefix + key.replace("Omega_1", "Omega_2")] = tuple(value.shape)
    return found


def _mend(state: dict[str, Tensor], key: str) -> bool:
    """Renew u and v of a weight if they give a norm that is not positive."""
    stem = key.removesuffix("_orig")
    W, u, v = state[key], state[f"{stem}_u"], state[f"{stem}_v"]
    if bool(u @ W @ v > 0) or not bool(W.any()):
        return False
    for _ in range(POWER_STEPS):
        v = torch.nn.functional.normalize(W.mT @ u, dim=0)
        u = torch.nn.functional.normalize(W @ v, dim=0)
    state[f"{stem}_u"], state[f"{stem}_v"] = u, v
    return True
