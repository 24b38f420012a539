"""One update of a model's weights, and the loop that repeats it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from math import inf
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from deq_zoo.errors import ZooError
from deq_zoo.preset import Preset
from deq_zoo.task import Batch, Loss, Task
from deq_zoo.tree import detached, to_device


class Devices(Protocol):
    """The part of accelerate's `Accelerator` that an update uses."""

    @property
    def device(self) -> torch.device: ...
    @property
    def num_processes(self) -> int: ...
    def autocast(self) -> AbstractContextManager[Any]: ...
    def backward(self, loss: Tensor) -> None: ...
    def gather(self, tensor: Tensor) -> Tensor: ...
    def clip_grad_norm_(self, parameters: Iterable[nn.Parameter], max_norm: float) -> object: ...
    def clip_grad_value_(self, parameters: Iterable[nn.Parameter], clip_value: float) -> None: ...
    def unwrap_model(self, model: nn.Module) -> nn.Module: ...


class OneDevice:
    """One process on one device.

    It has no state beyond itself, where an `Accelerator` configures its whole process.

    Args:
        device: the device.
        dtype: the precision of the model's arithmetic; None computes in that of the weights.
    """

    num_processes = 1

    def __init__(self, device: torch.device | str, dtype: torch.dtype | None = None) -> None:
        self.device, self.dtype = torch.device(device), dtype

    def autocast(self) -> AbstractContextManager[Any]:
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor

    def clip_grad_norm_(self, parameters: Iterable[nn.Parameter], max_norm: float) -> object:
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def clip_grad_value_(self, parameters: Iterable[nn.Parameter], clip_value: float) -> None:
        nn.utils.clip_grad_value_(parameters, clip_value)

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        return model


class Learner:
    """A model and its optimiser, with the tensors that a task carries from one update to the next.

    Args:
        preset: task, optimiser and clipping.
        model: on its device.
        optimizer: of the model's parameters.
        devices: how to compute.
        steps: updates of the whole run, for the schedule of the learning rate.
    """

    def __init__(
        self, preset: Preset, model: nn.Module, optimizer: Any, devices: Devices, steps: int
    ) -> None:
        self.preset, self.model, self.optimizer = preset, model, optimizer
        self.task: Task = preset.task
        self.devices, self.steps = devices, steps
        self.step, self.carry = 0, None

    def loop(
        self,
        batches: Iterator[Batch],
        add: Callable[[Loss, int], object],
        after_update: Callable[[float], bool],
    ) -> None:
        """Update until all steps are done.

        Args:
            batches: from the update at hand on.
            add: called with the loss of each batch and the number of its samples.
            after_update: called with the learning rate of each update; True ends the loop.
        """
        ended = False
        while self.step < self.steps and not ended:
            ended = after_update(self.update(batches, add))

    def update(self, batches: Iterator[Batch], add: Callable[[Loss, int], object]) -> float:
        """Take one step of the optimiser; return the learning rate.

        Args:
            batches: one or, where gradients accumulate, several are taken.
            add: called with the loss of each batch and the number of its samples.
        """
        rate = self.preset.optim.set_rate(self.optimizer, self.step, self.steps)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        for _ in range(self.preset.accumulate):
            batch = to_device(next(batches), self.devices.device)
            with self.devices.autocast():
                loss = self.task.loss(self.model, batch, self.carry)
            samples = self.task.batch_size(batch)
            weight = self._shard_weight(samples)
            self.devices.backward(loss.value * weight / self.preset.accumulate)
            self.carry = detached(loss.carry)
            add(loss, samples)
        if self.preset.clip:
            self.devices.clip_grad_norm_(self.model.parameters(), self.preset.clip)
        if self.preset.clip_value:
            self.devices.clip_grad_value_(self.model.parameters(), self.preset.clip_value)
        self.optimizer.step()
        self.task.after_step(self.devices.unwrap_model(self.model))
        self.step += 1
        return rate

    def _shard_weight(self, samples: int) -> float:
        """Return the weight of this process's part of a batch: the parts may differ in size."""
        world = self.devices.num_processes
        if world == 1:
            return 1.0
        counts = self.devices.gather(torch.tensor([samples], device=self.devices.device))
        return world * samples / max(1, int(counts.sum()))


def check_seconds(seconds: float | None) -> None:
    """Raise `ZooError` unless a limit of time is above 0, or None."""
    if seconds is not None and not 0 < seconds < inf:
        raise ZooError(f"max_seconds must be a number above 0, got {seconds}")
