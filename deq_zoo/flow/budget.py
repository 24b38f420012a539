"""Evaluations of f in training and in use."""

from __future__ import annotations

from torchdeq import DEQConfig


def training_evaluations(deq: DEQConfig) -> range:
    """Return the evaluations of f that lead to the last state of a training step.

    The smallest number leaves gradient steps out, the largest counts them: every slice of the solve
    ends with its own steps, and the next slice continues from there.
    """
    n = deq.n_states if deq.n_states > 1 else len(deq.indexing) + 1
    steps = deq.grad * n if len(deq.grad) == 1 else deq.grad
    on_the_way = steps[-n:] if deq.core == "sliced" else steps[-1:]
    if deq.implicit:  # the last state has no gradient steps
        on_the_way = on_the_way[:-1]
    return range(deq.f_max_iter, deq.f_max_iter + sum(on_the_way) + 1)


def budget_note(deq: DEQConfig) -> str:
    """Return a note if evaluation has another budget than training, else ""."""
    trained, budget = training_evaluations(deq), deq.budget_in_evaluation
    if budget in trained:
        return ""
    return f"its budget is {budget} evaluations, training makes {trained[-1]}"
