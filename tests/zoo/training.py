"""The training loop in its shortest form, for tests of tasks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from deq_zoo.task import Shard

CPU = torch.device("cpu")


class Trained(NamedTuple):
    """A trained model, the losses of all steps and what the last step carries on."""

    model: Any
    losses: list[float]
    carry: Any


def train(
    task: Any, steps: int, lr: float, seed: int = 0, model: nn.Module | None = None
) -> Trained:
    """Train a model with Adam; without `model`, a new one drawn from `seed`."""
    if model is None:
        torch.manual_seed(seed)
        model = task.build()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    losses, carry = list[float](), None
    for step in range(steps):
        loss = task.loss(model, task.train_batch(step, 0, Shard()), carry)
        carry = tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, loss.carry)
        optimizer.zero_grad()
        loss.value.backward()
        optimizer.step()
        task.after_step(model)
        losses.append(loss.value.item())
    return Trained(model.eval(), losses, carry)


@torch.no_grad()
def measure(task: Any, model: nn.Module, thorough: bool = False) -> dict[str, float]:
    """Return the metrics of a model in evaluation mode."""
    return dict(task.evaluate(model.eval(), CPU, thorough).metrics)
