"""Targets of a norm: which parameters of a module it normalises, and their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

#: The names of the parameters to normalise and the dimensions of their rows, by class of module.
Targets = dict[type[nn.Module], tuple[str | Sequence[str], int | Sequence[int]]]


def common_targets() -> Targets:
    """Return torch's layers with a weight, each with the dimension of its rows (the outputs)."""
    first = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    second = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    targets: Targets = dict.fromkeys(first, ("weight", 0))
    return targets | dict.fromkeys(second, ("weight", 1))


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return one or several names or dimensions as a tuple."""
    return (value,) if isinstance(value, (str, int)) else tuple(value)


def check_parameter(module: nn.Module, name: str, dim: int) -> None:
    """Raise unless the module has an initialised parameter `name` with a dimension `dim`."""
    weight = module._parameters.get(name)
    if weight is None or isinstance(weight, UninitializedParameter):
        reason = "there is no such parameter" if weight is None else "it has no shape yet"
        raise ValueError(
            f"cannot normalise the parameter {name!r} of {type(module).__name__}: {reason}; "
            "initialise the layer first, or filter it out"
        )
    if not -weight.dim() <= dim < weight.dim():
        raise ValueError(
            f"dims must name the dimension of the rows: {name} of shape {tuple(weight.shape)} has "
            f"no dimension {dim}"
        )
