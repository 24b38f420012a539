"""Evaluating a model on a split."""

from __future__ import annotations

import torch

from deq_zoo.finite import check_parameters
from deq_zoo.model import Model
from deq_zoo.randomness import unchanged_randomness
from deq_zoo.task import Evaluation, Split, Task


def evaluate(task: Task, model: Model, split: Split = "test", thorough: bool = True) -> Evaluation:
    """Return the task's own evaluation, without gradients, in evaluation mode.

    Random generators are as before afterwards: evaluating does not change how training goes on.
    Raise `ZooError` for a model with parameters that are not finite.
    """
    check_parameters(model)
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), unchanged_randomness():
            return task.evaluate(model, split, thorough)
    finally:
        model.train(training)
