"""Optimisers and learning-rate schedules as values; the rate depends on the step alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from math import cos, pi
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from deq_zoo.checks import check_fields
from deq_zoo.fused import can_fuse, keep_fused

if TYPE_CHECKING:
    from deq_zoo.model import Model


class Schedule(ABC):
    """A factor for the learning rate at each step."""

    @abstractmethod
    def factor(self, step: int, steps: int) -> float:
        """Return the factor for update `step` = 0, 1, ... out of `steps`."""


@dataclass(frozen=True)
class Constant(Schedule):
    """The same rate throughout."""

    def factor(self, step: int, steps: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine from 1 to `floor`, after a linear rise over `warmup` steps.

    Args:
        floor: rate at the end, relative to the highest.
        warmup: updates in which the rate rises.
    """

    floor: float = 0.0
    warmup: int = 0

    def factor(self, step: int, steps: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        share = (step - self.warmup) / max(1, steps - self.warmup)
        return self.floor + (1 - self.floor) * 0.5 * (1 + cos(pi * min(1.0, share)))


@dataclass(frozen=True)
class OneCycle(Schedule):
    """A linear rise over a share `rise` of the steps and a linear fall to `floor`.

    Args:
        rise: share of the updates in which the rate rises, from 0 to 1.
        floor: rate at the end, relative to the highest.
    """

    rise: float = 0.05
    floor: float = 0.0

    def factor(self, step: int, steps: int) -> float:
        top = max(1.0, self.rise * steps)
        if step < top:
            return (step + 1) / top
        return max(self.floor, (steps - step) / max(1.0, steps - top))


@dataclass(frozen=True)
class MultiStep(Schedule):
    """A rate that is multiplied by `decay` after each of the given shares of the steps.

    Args:
        at: shares of the updates after which the rate drops, from 0 to 1.
        decay: factor of each drop.
    """

    at: tuple[float, ...] = (0.5, 0.75)
    decay: float = 0.1

    def factor(self, step: int, steps: int) -> float:
        return float(self.decay ** sum(step >= share * steps for share in self.at))


@dataclass(frozen=True)
class LinearOneCycle(Schedule):
    """PyTorch's one-cycle policy with straight lines.

    Args:
        rise: share of the updates in which the rate rises, from 0 to 1.
        start: rate of the first update, relative to the highest.
        end: rate of the last update, relative to the first.
        extra: updates by which the cycle is longer than training.
    """

    rise: float = 0.05
    start: float = 1 / 25
    end: float = 1e-4
    extra: int = 100

    def factor(self, step: int, steps: int) -> float:
        last = steps + self.extra - 1
        top = self.rise * (steps + self.extra) - 1
        if step <= top:
            return self.start + (1 - self.start) * step / max(top, 1e-9)
        low = self.start * self.end
        return 1 + (low - 1) * min(1.0, (step - top) / max(last - top, 1e-9))


@dataclass(frozen=True)
class WarmCosine(Schedule):
    """A linear rise over `warmup` updates, then the rest of a cosine over the whole run.

    Args:
        warmup: updates in which the rate rises.
        loud_start: make the first update at the full rate, as the published runs did.
    """

    warmup: int = 0
    loud_start: bool = False

    def factor(self, step: int, steps: int) -> float:
        if step == 0 and self.loud_start:
            return 1.0
        if step < self.warmup:
            return (step if self.loud_start else step + 1) / self.warmup
        return 0.5 * (1 + cos(pi * min(1.0, step / max(1, steps))))


@dataclass(frozen=True)
class Trapezoid(Schedule):
    """The full rate, then a straight line to 0 at the end of the run.

    Args:
        cooldown: share of the updates in which the rate falls, from 0 to 1.
        warmup: updates in which the rate rises.
    """

    cooldown: float = 0.5
    warmup: int = 0

    def factor(self, step: int, steps: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        falling = int(self.cooldown * steps)
        return 1.0 if step <= steps - falling else max(0, steps - step) / falling


class Optim(ABC):
    """Options of an optimiser. Subclasses are frozen dataclasses."""

    lr: float
    schedule: Schedule
    #: Whether an update needs whole matrices: the shards of `parallel=fsdp` are an error then.
    needs_whole_matrices: ClassVar[bool] = False

    def __post_init__(self) -> None:
        numbers = [name for name, value in vars(self).items() if isinstance(value, float)]
        check_fields(self, 0, *numbers, finite=True)
        betas = getattr(self, "betas", (0.0, 0.0))
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {betas}")

    @abstractmethod
    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return an optimiser of parameters."""

    def make_for(self, model: Model) -> torch.optim.Optimizer:
        """Return an optimiser of the weights of a model that require a gradient."""
        return self.make(p for p in model.parameters() if p.requires_grad)

    def set_rate(self, optimizer: torch.optim.Optimizer, step: int, steps: int) -> float:
        """Set the rate of update `step`, relative to each group's own; return the first."""
        factor = self.schedule.factor(step, steps)
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("base_lr", self.lr) * factor
        rate: float = optimizer.param_groups[0]["lr"]
        return rate


@dataclass(frozen=True)
class SGD(Optim):
    """Stochastic gradient descent with momentum.

    Args:
        lr: learning rate.
        momentum: share of the last update that is kept, from 0 to 1.
        nesterov: use Nesterov's momentum.
        weight_decay: factor of the weights that is added to the gradient.
        schedule: the learning rate over the run.
    """

    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    schedule: Schedule = Constant()

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            parameters,
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
        )


@dataclass(frozen=True)
class Adam(Optim):
    """Adam; weight decay is decoupled from the gradient (AdamW), or added to it.

    Args:
        lr: learning rate.
        betas: decay rates of the means of the gradient and of its square.
        eps: number added to the root of the squared gradient's mean.
        weight_decay: strength of the weight decay.
        decoupled: apply the weight decay to the weights (AdamW), not to the gradient (Adam).
        schedule: the learning rate over the run.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True
    schedule: Schedule = Constant()

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        kind = torch.optim.AdamW if self.decoupled else torch.optim.Adam
        weights = list(parameters)
        optimizer = kind(
            weights,
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            fused=can_fuse(weights) or None,
        )
        keep_fused(optimizer)
        return optimizer
