"""The batch that training carries from step to step: puzzles stay until they halt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deq_zoo.reason.config import ReasonConfig
from deq_zoo.reason.core import States
from deq_zoo.task import Shard


class Puzzles(NamedTuple):
    """A batch of puzzles.

    Args:
        tokens: (B, L), the questions.
        labels: (B, L), the answers.
        ids: (B,), the row of each puzzle's own vector.
    """

    tokens: Tensor
    labels: Tensor
    ids: Tensor


class Carry(NamedTuple):
    """The state of training between two steps, one row for each slot of the batch.

    Args:
        puzzles: in the slots.
        states: of the puzzles, without a graph.
        steps: (B,), supervision steps so far.
        halted: (B,), whether the slot takes a new puzzle.
    """

    puzzles: Puzzles
    states: States | None
    steps: Tensor
    halted: Tensor


def as_carry(saved: Sequence[object]) -> Carry:
    """Return a carry that a checkpoint has turned into lists."""
    puzzles, states, steps, halted = saved
    return Carry(Puzzles(*puzzles), States(*states), steps, halted)  # type: ignore[misc,arg-type]


def refill(carry: Carry | None, offered: Puzzles) -> Carry:
    """Return the carry with a new puzzle in every slot that has halted.

    A row that is offered to a slot still at work is not used, as published: every pass through the
    data is a new permutation, so no puzzle is preferred.

    Args:
        carry: of the step before; None fills all slots.
        offered: a puzzle for each slot.
    """
    if carry is None:
        steps = torch.zeros_like(offered.ids)
        return Carry(offered, None, steps, torch.ones_like(steps, dtype=torch.bool))
    halted = carry.halted
    puzzles = Puzzles(
        *(
            torch.where(halted.view(-1, *[1] * (new.dim() - 1)), new, old)
            for new, old in zip(offered, carry.puzzles, strict=True)
        )
    )
    return Carry(puzzles, carry.states, torch.where(halted, 0, carry.steps), halted)


class Exploration(NamedTuple):
    """Random numbers that keep some puzzles from halting early.

    Args:
        u: (B,), uniform in [0, 1).
        least: (B,), uniform whole numbers from 2 to the most steps.
    """

    u: Tensor
    least: Tensor

    @classmethod
    def draw(cls, like: Tensor, most: int) -> Exploration:
        """Draw for as many slots as `like` has entries, from the global generator."""
        u = torch.rand(like.shape, device=like.device)
        return cls(u, torch.randint(2, most + 1, like.shape, device=like.device))


def advance(
    carry: Carry, states: States, q: Tensor, net: ReasonConfig, drawn: Exploration | None
) -> Carry:
    """Return the carry after a supervision step of training.

    Args:
        carry: after `refill`.
        states: after the step.
        q: (B, 2), logits of halting and of going on.
        net: the rule of halting is that of its kind.
        drawn: None lets every puzzle use all its steps, as in evaluation.
    """
    steps = carry.steps + 1
    halted = steps >= net.max_steps
    if drawn is not None and net.max_steps > 1:
        signal = q[:, 0] > (q[:, 1] if net.kind == "hrm" else 0)
        least = torch.where(drawn.u < net.exploration, drawn.least, 0)
        halted = (halted | signal) & (steps >= least)
    return Carry(carry.puzzles, States(*(h.detach() for h in states)), steps, halted)


def value_of_going_on(next_q: Tensor, steps: Tensor, net: ReasonConfig) -> Tensor:
    """Return (B,), the target of HRM's logit of going on.

    Args:
        next_q: (B, 2), of the supervision step after this one.
        steps: (B,), supervision steps before this one.
        net: its most steps.
    """
    last = steps + 1 >= net.max_steps
    return torch.where(last, next_q[:, 0], next_q.amax(1)).sigmoid()


def split_carries(carries: Sequence[Sequence[object]], shard: Shard) -> Carry:
    """Return the slots of one process of a run that goes on with another number of processes.

    Slot `i` of process `r` of `w` is slot `i * w + r` of the whole batch.
    """
    parts = [as_carry(saved) for saved in carries]

    def whole(tensors: Sequence[Tensor]) -> Tensor:
        joined = tensors[0].new_empty((sum(map(len, tensors)), *tensors[0].shape[1:]))
        for rank, part in enumerate(tensors):
            joined[rank :: len(tensors)] = part
        return joined[shard.rank :: shard.world]

    return Carry(
        Puzzles(*map(whole, zip(*(c.puzzles for c in parts), strict=True))),
        States(*map(whole, zip(*(c.states or () for c in parts), strict=True))),
        whole([c.steps for c in parts]),
        whole([c.halted for c in parts]),
    )
