"""Options of a DEQ that a task makes use of; any other is an error, not ignored.

The groups below hold every option of `DEQConfig` once. A task's property `uses` is a union of them,
e.g. `SOLVE | GRADIENT | NORM`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from torchdeq import DEQConfig

if TYPE_CHECKING:
    from deq_zoo.task import Task

#: The forward solve.
SOLVE = frozenset(
    [
        "f_solver",
        "f_solver_kwargs",
        "f_max_iter",
        "f_tol",
        "f_stop_mode",
        "f_rtol",
        "f_atol",
        "f_stop_norm",
        "f_check_every",
        "eval_factor",
        "eval_f_max_iter",
        "on_failure",
        "coupled",
        "sync_stop",
        "compile_f",
    ]
)
#: The gradient of a state, implicit or phantom.
GRADIENT = frozenset(
    [
        "backward",
        "ift",
        "hook_ift",
        "higher_order",
        "grad",
        "tau",
        "b_solver",
        "b_solver_kwargs",
        "b_max_iter",
        "b_tol",
        "b_stop_mode",
        "b_rtol",
        "b_atol",
        "b_check_every",
        "b_init",
    ]
)
#: The part of it that an implicit gradient alone has.
BACKWARD_SOLVE = frozenset(n for n in GRADIENT if n.startswith("b_")) | {"higher_order"}
#: Several states of one solve in training, and how they are weighted in the loss.
STATES = frozenset(["core", "n_states", "indexing", "sup_gap", "sup_loc", "gamma"])
#: The norm of the weights in f.
NORM = frozenset(
    [
        "norm_type",
        "norm_no_scale",
        "norm_clip",
        "norm_clip_value",
        "norm_target_norm",
        "sn_n_power_iters",
    ]
)
#: The regularisation of the Jacobian.
JACOBIAN = frozenset(["jac_loss_weight", "jac_loss_freq", "jac_incremental"])
#: The estimate of spectral radii in every evaluation, which the zoo makes at the end of a run.
RADIUS = frozenset({"sradius_mode"})


class UnusedOptions(ValueError):
    """Options of a DEQ that are set and have no effect on a task."""

    def __init__(self, names: list[str], why: str) -> None:
        super().__init__(f"{', '.join(names)} would have no effect: {why}")
        self.names = names


def check_chosen(task: Task, named: Collection[str]) -> None:
    """Raise `UnusedOptions` for options that a user names, and that others leave without effect.

    Presets may have some: a user who chooses the other gradient, or one state, need not take them
    back.

    Args:
        task: with the options.
        named: by the user.
    """
    defaults = DEQConfig.defaults()
    for idle, why in _without_effect(task.deq):
        unused = [
            name
            for name in DEQConfig.names()
            if name in idle and name in named and getattr(task.deq, name) != defaults[name]
        ]
        if unused:
            them = "it" if len(unused) == 1 else "them"
            raise UnusedOptions(unused, f"{why}, or drop {them}")


def _without_effect(deq: DEQConfig) -> Iterator[tuple[Collection[str], str]]:
    """Yield options that others leave without effect, with the reason and the cure."""
    if deq.core not in ("indexing", "sliced") or deq.backward not in ("auto", "ift", "phantom"):
        return  # an extension may read any option
    several = deq.n_states > 1 or bool(deq.indexing)
    phantom = several or not deq.implicit  # states before the last have phantom gradients
    if not phantom:
        yield ("grad", "tau", "sup_gap", "sup_loc"), "the gradient is implicit; add ift=false"
    if not deq.implicit:
        yield BACKWARD_SOLVE, "the gradient is not implicit; add ift=true"
    if deq.n_states > 1:
        yield ("indexing",), f"n_states={deq.n_states} places the states; add n_states=1"
    if not several:
        yield ("core",), "training has one state; add n_states=2"
    if not several and not (deq.sup_gap > 0 or deq.sup_loc):
        yield ("gamma",), "training has one state; add n_states=2"


def check_uses(task: Task) -> None:
    """Raise `UnusedOptions` for options of the DEQ that are set and have no effect on a task."""
    defaults = DEQConfig.defaults()
    unused = [
        name
        for name in DEQConfig.names()
        if name in task.deq.given
        and name not in task.uses
        and getattr(task.deq, name) != defaults[name]
    ]
    if unused:
        them = "it" if len(unused) == 1 else "them"
        raise UnusedOptions(unused, f"{type(task).__name__} makes no use of {them}")
