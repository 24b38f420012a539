"""Streams in evaluation and in servers: samples of a model enter and leave a running batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from deq_zoo.errors import ZooError
from torchdeq.core import DEQBase
from torchdeq.stream import Stream


def can_stream(deq: DEQBase) -> bool:
    """Return whether a stream can solve as a DEQ does in evaluation."""
    own = type(deq).forward is not DEQBase.forward
    budget = deq.eval_f_max_iter
    return not own and not deq.config.coupled and bool(budget) and deq.make_solver({}).streams


def open_stream(
    deq: DEQBase,
    f: Callable[..., Any],
    slots: int,
    return_final: bool = False,
    ahead: int | None = None,
) -> Stream:
    """Return a stream that solves as a DEQ does in evaluation; raise `ZooError` if it cannot.

    Args:
        deq: its solver, tolerance and budget of evaluation hold.
        f: the map, whose samples are independent of each other.
        slots: samples that are solved at the same time.
        return_final: spend the budget and return the last states.
        ahead: requests that may wait for a slot; see `Stream`.
    """
    solver, budget = deq.make_solver({}), deq.eval_f_max_iter
    if not solver.streams:
        raise ZooError(
            f"eval_slots={slots} needs a solver whose samples can come and go, got {solver}: set "
            "f_solver to fixed_point_iter, anderson or broyden, or eval_slots to 0"
        )
    if not budget:
        raise ZooError(
            f"eval_slots={slots} needs a solve in evaluation, and this DEQ only unrolls its steps: "
            "set eval_slots to 0"
        )
    stop = replace(deq.config.f_stop, max_iter=budget, return_final=return_final)
    return Stream(f, slots=slots, solver=solver, stop=stop, ahead=ahead)
