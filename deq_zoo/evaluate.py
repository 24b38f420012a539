"""Evaluating a model on a split."""

from __future__ import annotations

import torch

from deq_zoo.checkpoint import random_state, restore_random_state
from deq_zoo.model import Model
from deq_zoo.task import Evaluation, Split, Task


def evaluate(task: Task, model: Model, split: Split = "test", thorough: bool = True) -> Evaluation:
    """Return the task's own evaluation, without gradients, in evaluation mode.

    Random generators are as before afterwards: evaluating does not change how training goes on.
    """
    training, before = model.training, random_state()
    model.eval()
    try:
        with torch.no_grad():
            return task.evaluate(model, split, thorough)
    finally:
        model.train(training)
        restore_random_state(before)
