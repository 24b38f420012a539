"""Settings that contradict each other, or that would be lost without a word.

They are looked at when a model is built or data is opened, and not one by one as they are set: on a
command line each may come before the one it needs.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from deq_zoo.errors import DataError

if TYPE_CHECKING:
    from deq_zoo.lm.task import LanguageTask


def check_training(task: LanguageTask) -> None:
    """Those of the loss and the equilibrium."""
    deq = task.deq
    if task.consistency and (deq.implicit or deq.grad[0] < 2):
        raise ValueError(
            f"consistency={task.consistency} compares unrolled steps: it needs grad >= 2 without "
            "ift, or consistency=0"
        )
    if task.ahead and (deq.implicit or deq.f_max_iter):
        raise ValueError(
            f"ahead={task.ahead} draws the number of evaluations before the gradient's steps: set "
            "ahead=0 to have f_max_iter or ift count"
        )
    if deq.implicit and not deq.f_max_iter:
        raise ValueError("an implicit gradient is of a solved state: ift needs f_max_iter > 0")
    if bool(deq.jac_loss_weight or deq.jac_incremental) != bool(deq.jac_loss_freq):
        raise ValueError(
            "the Jacobian's regularisation has a weight and a share of steps: got jac_loss_weight="
            f"{deq.jac_loss_weight}, jac_incremental={deq.jac_incremental} and jac_loss_freq="
            f"{deq.jac_loss_freq}, of which one alone does nothing"
        )
    if task.net.design == "redesigned":
        _warn_without_fixed_point(task)


def _warn_without_fixed_point(task: LanguageTask) -> None:
    deq = task.deq
    if deq.implicit:
        warnings.warn(
            "the redesigned map has no fixed point, so its implicit gradient is not defined: "
            "unroll it, or use design=convergent",
            stacklevel=4,
        )
        return
    trained, judged = deq.f_max_iter + deq.grad[0], deq.budget_in_evaluation or deq.grad[0]
    if trained != judged:
        warnings.warn(
            f"the redesigned map has no fixed point, so it should be evaluated with the steps it "
            f"was trained with: {trained}, not {judged} (eval_f_max_iter)",
            stacklevel=4,
        )


def check_data(task: LanguageTask) -> None:
    """Those of data, which only one kind of it reads."""
    for name, needed, lost in (
        ("file", "file", task.data != "file"),
        ("data_dir", "wikitext", task.data != "wikitext"),
        ("pieces", "file", task.data == "wikitext"),
    ):
        value = getattr(task, name)
        if value and lost:
            raise DataError(
                f"{name}={value} does nothing with data={task.data}: drop it, or --set "
                f"data={needed}"
            )
