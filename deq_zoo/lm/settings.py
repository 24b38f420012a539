"""Checks of settings that contradict each other, or would have no effect.

They run when a model is built or data is opened, and not when a setting changes: on a command line,
a setting may come before another that it needs.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from deq_zoo.errors import DataError

if TYPE_CHECKING:
    from deq_zoo.lm.task import LanguageTask


def check_training(task: LanguageTask) -> None:
    """Raise `ValueError` for contradictions between the loss and the equilibrium."""
    deq = task.deq
    if task.consistency and (deq.implicit or deq.grad[0] < 2):
        raise ValueError(
            f"consistency={task.consistency} compares the last two unrolled steps: set grad to 2 "
            "or more and drop ift, or set consistency=0"
        )
    if task.ahead and (deq.implicit or deq.f_max_iter):
        raise ValueError(
            f"ahead={task.ahead} draws the number of evaluations before the steps of the gradient, "
            "so f_max_iter and ift would have no effect: drop them, or set ahead=0"
        )
    if task.ramp and not task.ahead:
        raise ValueError(
            f"ramp={task.ramp} is a rise to ahead, which is 0: set ahead, or drop ramp"
        )
    if task.explicit and task.net.design != "attractor":
        raise ValueError(
            f"explicit={task.explicit} needs the backbone of an attractor, the design is "
            f"{task.net.design}: set explicit=0, or design=attractor"
        )
    if task.consistency and task.net.mixing == "published":
        raise ValueError(
            "mixing=published has one state and no unrolled steps to compare: set consistency=0, "
            "or mixing=positions"
        )
    if deq.implicit and not deq.f_max_iter:
        raise ValueError("ift differentiates a solved state: set f_max_iter above 0")
    if bool(deq.jac_loss_weight or deq.jac_incremental) != bool(deq.jac_loss_freq):
        raise ValueError(
            "the Jacobian is regularised with a weight and a fraction of steps, and one of them "
            f"alone has no effect: got jac_loss_weight={deq.jac_loss_weight}, jac_incremental="
            f"{deq.jac_incremental} and jac_loss_freq={deq.jac_loss_freq}"
        )
    if not task.net.has_fixed_point:
        _warn_without_fixed_point(task)


def _warn_without_fixed_point(task: LanguageTask) -> None:
    """Warn of options that make no sense for a map without a fixed point."""
    deq = task.deq
    what = "pre_norm=true" if task.net.pre_norm else f"design={task.net.design}"
    if deq.implicit:
        warnings.warn(
            f"a map with {what} has no fixed point, so it has no implicit gradient: drop ift and "
            "unroll the map by f_max_iter=0 and grad, or choose design=convergent",
            stacklevel=4,
        )
        return
    trained = deq.f_max_iter + deq.grad[0]
    evaluated = deq.budget_in_evaluation or deq.grad[0]
    if trained != evaluated:
        warnings.warn(
            f"a map with {what} has no fixed point, so evaluation must use the {trained} "
            f"evaluations of training, not {evaluated}: set eval_f_max_iter={trained}",
            stacklevel=4,
        )


def check_data(task: LanguageTask) -> None:
    """Raise `DataError` for options that the chosen data does not use."""
    for name, needed, unused in (
        ("file", "file", task.data != "file"),
        ("data_dir", "wikitext", task.data != "wikitext"),
        ("pieces", "file", task.data == "wikitext"),
    ):
        value = getattr(task, name)
        if value and unused:
            raise DataError(
                f"{name}={value} has no effect with data={task.data}: drop it, or --set "
                f"data={needed}"
            )
