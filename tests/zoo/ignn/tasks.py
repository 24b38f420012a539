"""Small tasks, and their metrics."""

from __future__ import annotations

from typing import Any

import torch

from deq_zoo.evaluate import evaluate
from deq_zoo.ignn import IGNNConfig
from deq_zoo.ignn.base import IGNNTask
from deq_zoo.ignn.data import random_graphs
from deq_zoo.ignn.set_task import TissueTask
from deq_zoo.ignn.task import NodeTask
from torchdeq import DEQConfig


def make_task(**changes: Any) -> NodeTask:
    options: dict[str, Any] = {
        "net": IGNNConfig(width=8, kappa=0.9, dropout=0.0, unit=True, start="zeros"),
        "deq": DEQConfig(norm_type="none", ift=True, f_max_iter=40, f_tol=0.0, b_tol=0.0),
        "length": 8,
    }
    return NodeTask(**(options | changes))


def make_tissues(**changes: Any) -> TissueTask:
    task = TissueTask(net=IGNNConfig(width=2), deq=DEQConfig(norm_type="none"), **changes)
    made = random_graphs(6)
    y = torch.nn.functional.one_hot(torch.arange(len(made.x)) % 2).float()
    made = type(made)(made.edges, made.sizes, made.x, y, (0, 1, 2, 3), (4,), (5,))
    task.__dict__["examples"] = made  # in place of files
    return task


def measure(task: IGNNTask, model: Any) -> tuple[dict[str, float], dict[str, float]]:
    """Return the metrics on validation and test data."""
    val, test = (dict(evaluate(task, model, split, False).metrics) for split in ("val", "test"))
    return val, test
