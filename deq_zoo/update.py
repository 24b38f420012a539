"""One update of a model's weights, and the loop that repeats it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from math import inf
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from deq_zoo.errors import ZooError
from deq_zoo.precision import Precision, autocast, make_scaler
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
        precision: of the model's arithmetic; see `Preset`.
    """

    num_processes = 1

    def __init__(self, device: torch.device | str, precision: Precision = "no") -> None:
        self.device, self.precision = torch.device(device), precision
        self._scaler = make_scaler(precision, self.device)
        self._optimizer: Any = None

    def prepare(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return the optimiser of a run; with scaled losses, one that skips steps of infinities."""
        self._optimizer = optimizer
        return optimizer if self._scaler is None else _Scaled(optimizer, self._scaler)

    def autocast(self) -> AbstractContextManager[Any]:
        return autocast(self.precision, self.device)

    def backward(self, loss: Tensor) -> None:
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor

    def clip_grad_norm_(self, parameters: Iterable[nn.Parameter], max_norm: float) -> object:
        self._unscale()
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def clip_grad_value_(self, parameters: Iterable[nn.Parameter], clip_value: float) -> None:
        self._unscale()
        nn.utils.clip_grad_value_(parameters, clip_value)

    def _unscale(self) -> None:
        """Divide the gradients by the scale of the loss: limits are those of true gradients."""
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        return model


class _Scaled:
    """An optimiser whose gradients are those of a scaled loss, like that of accelerate."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        self.optimizer, self._scaler = optimizer, scaler
        self.param_groups = optimizer.param_groups
        self.zero_grad = optimizer.zero_grad

    def step(self) -> None:
        self._scaler.step(self.optimizer)
        self._scaler.update()


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
        self._dtype = torch.float64 if preset.precision == "float64" else None
        self.task.check_length(steps * preset.accumulate)

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
            batch = to_device(next(batches), self.devices.device, self._dtype)
            with self.devices.autocast():
                loss = self.compute_loss(batch)
            samples = self.task.batch_size(batch)
            weight = self._shard_weight(samples)
            self.devices.backward(loss.value * weight / self.preset.accumulate)
            self.carry = detached(loss.carry)
            add(loss, samples)
        self._clip()
        self.optimizer.step()
        self.after_step()
        self.step += 1
        return rate

    def compute_loss(self, batch: Batch) -> Loss:
        """Return the loss of a batch."""
        return self.task.loss(self.model, batch, self.carry)

    def after_step(self) -> None:
        """Let the task change the model after an update."""
        self.task.after_step(self.devices.unwrap_model(self.model))

    def _clip(self) -> None:
        """Limit the gradient by its norm and by its entries, as the preset says."""
        parameters, norm, value = self.model.parameters, self.preset.clip, self.preset.clip_value
        if norm:
            self.devices.clip_grad_norm_(parameters(), norm)
        if value and norm:  # the gradients are unscaled, and a scaler refuses to do it twice
            nn.utils.clip_grad_value_(parameters(), value)
        elif value:
            self.devices.clip_grad_value_(parameters(), value)

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
