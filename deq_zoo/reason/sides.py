"""Models for boards of another side than that of training."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from math import isqrt
from typing import TYPE_CHECKING, Any

from deq_zoo.errors import ZooError

if TYPE_CHECKING:
    from deq_zoo.reason.model import Reasoner

#: The largest side that is answered: about half a minute of one core, if no attempt settles.
LARGEST = 64


def side_of(model: Reasoner) -> int:
    """Return the side of the boards that a model is for."""
    return isqrt(model.net.cells)


def fits_any_side(model: Reasoner) -> bool:
    """Return whether the weights fit boards of any side: those of mazes, seen by a convolution."""
    net = model.net
    is_free = net.mixer == "conv" and net.position == "none"
    return is_free and model.facts.get("puzzle") == "maze"


def for_side(model: Reasoner, side: int) -> Reasoner:
    """Return a model for mazes of a side: itself, or a copy; raise `ZooError` if none fits.

    Args:
        model: in training or in evaluation mode.
        side: cells of a row, walls included; from 1 to `LARGEST`.
    """
    if isinstance(side, bool) or not isinstance(side, int):
        raise TypeError(f"a side is a whole number, got {side!r}")
    if side == side_of(model):
        return model
    if not fits_any_side(model):
        raise ZooError(
            f"this model knows boards of {side_of(model)}x{side_of(model)}, got {side}x{side}: "
            "only mazes with net.mixer=conv and net.position=none have any side"
        )
    if not 1 <= side <= LARGEST:
        raise ZooError(
            f"mazes have from 1 to {LARGEST} cells in a row, got {side}: larger ones would take "
            "too long"
        )
    other, net = deepcopy(model), replace(model.net, cells=side**2)
    other.net = other.core.net = net
    if other.average is not None:
        other.average.net = net
    other.facts = {"trained_side": side_of(model), **model.facts, "side": side}
    if model.preset is not None:  # the copy is saved and loaded as what it is
        task: Any = model.preset.task
        other.preset = replace(model.preset, task=replace(task, net=net))
    other.origin = None  # its results are of another side
    return other
