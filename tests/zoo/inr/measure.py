"""The metrics of a model, for tests of tasks."""

from __future__ import annotations

from typing import Any

from deq_zoo.evaluate import evaluate
from deq_zoo.task import Split


def measure(
    task: Any, model: Any, split: Split = "test", thorough: bool = False
) -> dict[str, float]:
    """Return the metrics of a model on a split."""
    return dict(evaluate(task, model, split, thorough).metrics)
