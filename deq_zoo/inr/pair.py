"""Two fields that are trained side by side, each kept at its own best."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from deq_zoo.inr.model import Field
from deq_zoo.inr.representation import PointsOrSize, Representation
from deq_zoo.inr.signal import Grid
from deq_zoo.output import Output

_ENTRIES = 128  # of a course


class Course(nn.Module):
    """The PSNR of both fields on validation pixels, by training step.

    When it is full, every second entry is dropped, and from then on it records half as often.
    """

    psnr: Tensor
    steps: Tensor
    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("psnr", torch.zeros(_ENTRIES, 2))
        self.register_buffer("steps", torch.zeros(_ENTRIES, dtype=torch.int64))
        self.register_buffer("state", torch.tensor([0, 1]))  # entries, of which looks it takes one

    def record(self, look: int, step: int, psnr: Tensor) -> None:
        """Add an entry.

        Args:
            look: number of the comparison, from 0.
            step: of the training.
            psnr: (2,) of both fields.
        """
        count, every = self.state.tolist()
        if look % every:
            return
        if count == _ENTRIES:
            count //= 2
            for buffer in (self.psnr, self.steps):
                buffer[:count] = buffer[::2].clone()
            self.state[1] = 2 * every
        self.psnr[count], self.steps[count] = psnr, step
        self.state[0] = count + 1

    def entries(self) -> tuple[Tensor, Tensor]:
        """Return steps (n,) and PSNR (n, 2)."""
        count = int(self.state[0])
        return self.steps[:count], self.psnr[:count]


class Pair(Representation):
    """An equilibrium and its rival; a copy of each keeps its weights of the best validation PSNR.

    In training, `forward` calls the fields that are trained; in evaluation, their best copies.

    Args:
        field: the equilibrium.
        rival: trained with the same points at the same steps.
        grid: of the signal.
    """

    step: Tensor
    best_psnr: Tensor
    best_step: Tensor

    def __init__(self, field: Field, rival: Field, grid: Grid | None = None) -> None:
        super().__init__(field, grid)
        self.rival = rival
        self.best = nn.ModuleList(deepcopy(each).requires_grad_(False) for each in (field, rival))
        self.course = Course()
        self.register_buffer("step", torch.tensor(0))
        self.register_buffer("best_psnr", torch.full((2,), -1.0))  # a PSNR of pictures is >= 0
        self.register_buffer("best_step", torch.zeros(2, dtype=torch.int64))  # 0: no look yet

    def forward(
        self, x: Tensor, z0: Tensor | None = None, rival: bool = False, **call: Any
    ) -> Output[Tensor, Tensor | None]:
        """Return the values of the equilibrium, or of its rival, at points."""
        fields = (self.field, self.rival) if self.training else self.chosen
        out: Output[Tensor, Tensor | None] = fields[rival](x, z0, **call)
        return out

    def _predict(
        self, x: PointsOrSize, z0: Tensor | None, **call: Any
    ) -> Output[Tensor, Tensor | None]:
        return self.best_representation().predict(x, z0, **call)

    @property
    def chosen(self) -> tuple[Field, Field]:
        """Return both fields at their best; those in training before the first look."""
        current, steps = (self.field, self.rival), self.best_step.tolist()
        a, b = (self.best[k] if steps[k] else current[k] for k in range(2))
        return a, b  # type: ignore[return-value]

    def best_representation(self) -> Representation:
        """Return the equilibrium at its best, alone."""
        return Representation(self.chosen[0], self.grid)

    def look(self, psnr: Tensor, every: int) -> None:
        """Copy the weights of each field whose validation PSNR is its best so far.

        Args:
            psnr: (2,) of the fields as they are.
            every: steps between two looks.
        """
        self.course.record(int(self.step) // every - 1, int(self.step), psnr)
        for k, each in enumerate((self.field, self.rival)):
            if psnr[k] > self.best_psnr[k]:
                self.best[k].load_state_dict(each.state_dict())
                self.best_psnr[k], self.best_step[k] = psnr[k], self.step

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        """Load weights; those of earlier versions have no best copies."""
        if prefix + "step" not in state_dict:
            _add_best(state_dict, prefix, self.state_dict())
        super()._load_from_state_dict(state_dict, prefix, *args)


def _add_best(state: dict[str, Tensor], prefix: str, fresh: Mapping[str, Tensor]) -> None:
    """Complete the weights of an earlier version: its fields are the best so far.

    Args:
        state: the weights, changed in place.
        prefix: of all their names.
        fresh: those of a new pair, for the records.
    """
    steps = state.get(f"{prefix}course.count")
    for name in ("entries", "count", "seconds"):  # clock times, which this version does not keep
        state.pop(f"{prefix}course.{name}", None)
    for k, part in enumerate(("field.", "rival.")):
        for key in [key for key in state if key.startswith(prefix + part)]:
            state[f"{prefix}best.{k}.{key.removeprefix(prefix + part)}"] = state[key]
    for name in ("best_psnr", "best_step", "course.psnr", "course.steps", "course.state", "step"):
        state[prefix + name] = fresh[name]
    if steps is not None:
        state[prefix + "step"] = steps[1]
