"""Weights must be finite: NaN and infinity are not trained on, saved or used.

Every parameter must be finite, and every tensor of the state_dict beside the parameters (running
statistics, averages of weights) that was finite when the model was built. Infinities that a model
is built with, e.g. a mask of `-inf`, are part of its design. Of a sharded tensor, each process
checks its own part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from math import isfinite
from typing import Any

from torch import Tensor, nn

from deq_zoo.errors import ZooError
from deq_zoo.model import Model
from deq_zoo.tree import local, tensors

_WHAT_TO_TRY = (
    "lower the learning rate (--set lr=...), clip the gradient (--set clip=1) or damp the "
    "equilibrium (--tau)"
)


def not_finite_by_design(model: nn.Module) -> frozenset[str]:
    """Return the names of tensors in a newly built model that may hold NaN or infinity."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return frozenset(name for name in _not_finite(_state(model)) if name not in parameters)


def find_not_finite(model: nn.Module, exempt: Iterable[str] = ()) -> str | None:
    """Return the name of the first tensor of a model that holds NaN or infinity, if one does.

    Args:
        model: the model.
        exempt: names of tensors that may, see `not_finite_by_design`.
    """
    return next((name for name in _not_finite(_state(model)) if name not in exempt), None)


def check_parameters(model: nn.Module) -> None:
    """Raise `ZooError` if a parameter of a model holds NaN or infinity, or an average of one."""
    copies = model.copied_weights() if isinstance(model, Model) else {}
    averages = ((name, t) for name, t in model.named_buffers() if name in copies)
    name = next(_not_finite(chain(model.named_parameters(), averages)), None)
    if name is not None:
        raise ZooError(
            f"the parameter {name} holds NaN or infinity: results of this model would mean nothing"
        )


def all_finite(tree: Any) -> bool:
    """Return whether no floating-point tensor of a tree holds NaN or infinity."""
    return next(_not_finite(("", t) for t in tensors(tree)), None) is None


def check_loss(loss: float, step: int, advice: str = "") -> None:
    """Raise `ZooError` if a loss is NaN or infinite.

    Args:
        loss: the loss.
        step: its update.
        advice: what is left, e.g. the last good checkpoint.
    """
    if not isfinite(loss):
        raise diverged(f"the loss is {loss}", step, advice)


def diverged(what: str, step: int, advice: str = "") -> ZooError:
    """Return the error for training that has diverged.

    Args:
        what: a clause that says what is not finite.
        step: the update after which this was noticed.
        advice: what is left, e.g. the last good checkpoint.
    """
    return ZooError(f"{what} at step {step}: {_WHAT_TO_TRY}{'; ' if advice else ''}{advice}")


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((k, v) for k, v in model.state_dict().items() if isinstance(v, Tensor))


def _not_finite(named: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
    for name, tensor in named:
        floating = tensor.is_floating_point() or tensor.is_complex()
        if floating and not bool(local(tensor.detach()).isfinite().all()):
            yield name
