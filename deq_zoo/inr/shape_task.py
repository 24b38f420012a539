"""A field learns a signed distance: its values and the length of its gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from deq_zoo.checks import check_fields
from deq_zoo.exportable import Exportable, NoOptions
from deq_zoo.inr.blocks import block_size, mean_or_zero, sum_blocks
from deq_zoo.inr.derivatives import value_and_gradient
from deq_zoo.inr.exporting import make_export
from deq_zoo.inr.fields import make_field
from deq_zoo.inr.model import Field, FieldConfig
from deq_zoo.inr.recipes import EXACT, drop_recipe
from deq_zoo.inr.shapes import DIMENSIONS, Distance, Name, distance
from deq_zoo.output import Output
from deq_zoo.record import SolverRecord
from deq_zoo.task import WHOLE, Evaluation, Loss, Picture, Score, Shard, Split, Task, generator
from deq_zoo.uses import GRADIENT, NORM, SOLVE
from torchdeq import DEQConfig, SolverStat

_POINTS = 4096  # of the validation and of the test set
_SIDE = 96  # of the picture, in pixels


@dataclass(frozen=True)
class FitShape(Task):
    r"""The signed distance $s$ of a shape, from points drawn anew at every step.

    $$\ell = \mathrm{mean} \, (y - s)^2 + w \, \mathrm{mean} \, (|\nabla y| - 1)^2$$

    The gradient along coordinates is that of the equilibrium itself, and training differentiates
    it once more: exact, with the options `ift` and `higher_order`. Validation and test set are
    random points of their own. `distance_error` is the mean of $|y - s|$, `overlap` the
    intersection over union of the insides, in percent.

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
    deq: DEQConfig = EXACT
    shape: Name = "disc"
    file: str | None = None
    batch: int = 1024
    eikonal: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "deq", drop_recipe(self.deq, self.uses))
        super().__post_init__()
        check_fields(self, 1, "batch")
        check_fields(self, 0, "eikonal")
        exact = self.deq.implicit and self.deq.higher_order
        if self.eikonal and self.net.implicit and not exact:
            raise ValueError(
                "an eikonal loss differentiates the field twice, which is exact with ift=True and "
                "higher_order=True: set both, or eikonal=0"
            )

    @property
    def uses(self) -> frozenset[str]:
        """Return the options that have an effect on the field: an explicit one has no solve."""
        if self.net.implicit:
            return SOLVE | GRADIENT | NORM
        return NORM if self.net.kind == "one_pass" else frozenset()

    @property
    def d(self) -> int:
        """Return the coordinates of a point."""
        return DIMENSIONS[self.shape]

    @cached_property
    def distance(self) -> Distance:
        """Return the signed distance, which is all training data."""
        return distance(self.shape, self.file)

    @property
    def train_set(self) -> Distance:
        """Return the signed distance, which has an exact value at every point."""
        return self.distance

    @property
    def val_set(self) -> Tensor:
        """Return random points."""
        return self._points("val")

    @property
    def test_set(self) -> Tensor:
        """Return random points, others than those of `val_set`."""
        return self._points("test")

    def _points(self, split: Split) -> Tensor:
        drawn = torch.rand(_POINTS, self.d, generator=generator("shape", split, self.shape))
        return 2 * drawn - 1

    def build(self, facts: Mapping[str, Any] | None = None) -> Field:
        return make_field(self.d, 1, self.net, self.deq)

    @property
    def steps_per_epoch(self) -> int:
        return 1

    def train_batch(self, step: int, seed: int, shard: Shard = WHOLE) -> Tensor:
        drawn = torch.rand(self.batch, self.d, generator=generator("shape", seed, step))
        return (2 * drawn - 1)[shard.rank :: shard.world]

    def loss(self, model: Any, batch: Tensor, carry: Any) -> Loss:
        stats: list[SolverStat] = []
        parameters = [p for p in model.parameters() if p.requires_grad]

        def evaluate(x: Tensor) -> Tensor:
            out: Output[Tensor, Any] = model(x)
            stats.extend([] if out.stats is None else [out.stats])
            return out.prediction

        def losses() -> Iterator[Tensor]:
            for x in batch.split(block_size(self.net.width)):
                wanted = self.distance(x)
                if self.eikonal:
                    y, gradient = value_and_gradient(evaluate, x)
                    slope = mean_or_zero((gradient[:, 0].norm(dim=1) - 1).square())
                else:
                    y, slope = evaluate(x), x.new_zeros(())
                error = mean_or_zero((y[:, 0] - wanted).square())
                yield len(x) / max(1, len(batch)) * (error + self.eikonal * slope)

        return Loss(sum_blocks(losses(), parameters), stats=stats[0] if stats else None)

    def evaluate(self, model: Any, split: Split, thorough: bool = False) -> Evaluation:
        record = SolverRecord()
        x = self.test_set if split == "test" else self.val_set
        call = {"sradius_mode": True} if thorough and self.net.implicit else {}
        out: Output[Tensor, Any] = model(x.to(model.device), **call)
        record.add(out.stats)
        y, wanted = out.prediction[:, 0].float().cpu(), self.distance(x)
        inside, truth = y < 0, wanted < 0
        overlap = (inside & truth).sum() / (inside | truth).sum().clamp_min(1)
        error = float((y - wanted).abs().mean())
        return Evaluation({"distance_error": error, "overlap": 100 * float(overlap)}, record)

    def export(self, model: Any, options: NoOptions) -> Exportable:
        return make_export(model, model.facts)

    @torch.no_grad()
    def pictures(self, model: Any) -> list[Picture]:
        from deq_zoo.inr.pictures import plot_distance

        axis = torch.linspace(-1, 1, _SIDE)
        row, column = torch.meshgrid(axis, axis, indexing="ij")
        flat = [column.flatten(), row.flatten(), torch.zeros(_SIDE**2)]
        x = torch.stack(flat[: self.d], dim=1)
        y = model(x.to(model.device)).prediction[:, 0].float().cpu()
        wanted, side = self.distance(x), (_SIDE, _SIDE)
        plane = (
            f"of the {self.shape}" if self.d == 2 else f"of the {self.shape}, in the plane z = 0"
        )
        return [plot_distance(y.view(side), wanted.view(side), plane)]
