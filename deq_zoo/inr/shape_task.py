"""A field learns a signed distance: values and the length of the gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from deq_zoo.checks import check_fields
from deq_zoo.inr.blocks import block_size, mean_of, summed
from deq_zoo.inr.derivatives import value_and_gradient
from deq_zoo.inr.fields import make_field
from deq_zoo.inr.model import FieldConfig, Output
from deq_zoo.inr.shapes import DIMENSIONS, Distance, Name, distance
from deq_zoo.record import SolverRecord
from deq_zoo.task import WHOLE, Evaluation, Loss, Picture, Score, Shard, Task, generator
from torchdeq import DEQConfig, SolverStat

_JUDGED = 4096  # points
_SHOWN = 96  # pixels along a side of the picture


@dataclass(frozen=True)
class FitShape(Task):
    r"""The signed distance $s$ of a shape, from points drawn anew at every step.

    $$\ell = \mathrm{mean} \, (y - s)^2 + w \, \mathrm{mean} \, (|\nabla y| - 1)^2$$

    The gradient along coordinates is that of the equilibrium itself, and training differentiates
    it once more: exact, with the options `ift` and `higher_order`.

    Args:
        net: the shape of the field.
        deq: options of the equilibrium.
        shape: disc, box, sphere, torus, or silhouette of an image.
        file: the image of a silhouette.
        batch: points per step.
        eikonal: the weight w.
    """

    score: ClassVar[Score] = Score("distance_error", higher_is_better=False)

    net: FieldConfig = field(default_factory=lambda: FieldConfig(width=64, input_scale=4.0))
    deq: DEQConfig = field(default_factory=lambda: DEQConfig(ift=True, higher_order=True))
    shape: Name = "disc"
    file: str | None = None
    batch: int = 1024
    eikonal: float = 0.1

    def __post_init__(self) -> None:
        check_fields(self, 1, "batch")
        check_fields(self, 0, "eikonal")
        exact = self.deq.implicit and self.deq.higher_order
        if self.eikonal and self.net.implicit and not exact:
            raise ValueError(
                "an eikonal loss differentiates the field twice, which is exact with ift=True and "
                "higher_order=True: set both, or eikonal=0"
            )

    @property
    def d(self) -> int:
        """Coordinates of a point."""
        return DIMENSIONS[self.shape]

    @cached_property
    def distance(self) -> Distance:
        return distance(self.shape, self.file)

    def build(self) -> nn.Module:
        return make_field(self.d, 1, self.net, self.deq)

    @property
    def steps_per_epoch(self) -> int:
        return 1

    def train_batch(self, step: int, seed: int, shard: Shard = WHOLE) -> Tensor:
        drawn = torch.rand(self.batch, self.d, generator=generator("shape", seed, step))
        return (2 * drawn - 1)[shard.rank :: shard.world]

    def loss(self, model: nn.Module, batch: Tensor, carry: Any) -> Loss:
        stats: list[SolverStat] = []
        parameters = [p for p in model.parameters() if p.requires_grad]

        def field(x: Tensor) -> Tensor:
            out: Output = model(x)
            if out.stats is not None:
                stats.append(out.stats)
            return out.values[-1]

        def losses() -> Iterator[Tensor]:
            for x in batch.split(block_size(self.net.width)):
                wanted = self.distance(x)
                if self.eikonal:
                    y, gradient = value_and_gradient(field, x)
                    slope = mean_of((gradient[:, 0].norm(dim=1) - 1).square())
                else:
                    y, slope = field(x), x.new_zeros(())
                error = mean_of((y[:, 0] - wanted).square())
                yield len(x) / max(1, len(batch)) * (error + self.eikonal * slope)

        return Loss(summed(losses(), parameters), stats=stats[0] if stats else None)

    def evaluate(self, model: nn.Module, device: torch.device, thorough: bool) -> Evaluation:
        record = SolverRecord()
        x = 2 * torch.rand(_JUDGED, self.d, generator=generator("judged", self.shape)) - 1
        call = {"sradius_mode": True} if thorough and self.net.implicit else {}
        out: Output = model(x.to(device), **call)
        if out.stats is not None:
            record.add(out.stats)
        y, wanted = out.values[-1][:, 0].float().cpu(), self.distance(x)
        inside, truth = y < 0, wanted < 0
        overlap = (inside & truth).sum() / (inside | truth).sum().clamp_min(1)
        error = float((y - wanted).abs().mean())
        return Evaluation({"distance_error": error, "overlap": 100 * float(overlap)}, record)

    @torch.no_grad()
    def pictures(self, model: nn.Module, device: torch.device) -> list[Picture]:
        from deq_zoo.inr.pictures import contours

        axis = torch.linspace(-1, 1, _SHOWN)
        row, column = torch.meshgrid(axis, axis, indexing="ij")
        flat = [column.flatten(), row.flatten(), torch.zeros(_SHOWN**2)]  # a cut through the middle
        x = torch.stack(flat[: self.d], dim=1)
        y = model(x.to(device)).values[-1][:, 0].float().cpu()
        return [contours(y.view(_SHOWN, _SHOWN), self.distance(x).view(_SHOWN, _SHOWN))]
