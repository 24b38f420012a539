"""Small models for tests."""

from __future__ import annotations

from typing import Any

import torch

from deq_zoo.lm import DEQTransformer, LMConfig
from tests.zoo.lm.golden import TIGHT, UNROLLED

DESIGNS = ["original", "redesigned", "convergent"]


def make_config(design: str, **changes: Any) -> LMConfig:
    shape: dict[str, Any] = {
        "tokens": 11,
        "width": 8,
        "heads": 2,
        "inner": 12,
        "blocks": 1 if design == "original" else 2,
        "cutoffs": (4, 7),
        "shrink": 2,
        "dropout": 0.0,
    }
    return LMConfig(design=design, **(shape | changes))  # type: ignore[arg-type]


def make_model(design: str, deq: Any = None, **changes: Any) -> DEQTransformer:
    """Build a model in float64 whose map contracts, if its design can."""
    torch.manual_seed(0)
    deq = deq or (UNROLLED if design == "redesigned" else TIGHT)
    model = DEQTransformer(make_config(design, **changes), deq).double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "vocabulary" in name or "injection.weight" in name:
                p.normal_(std=0.3)
            elif name.endswith("_net.weight_g"):
                p.fill_(0.6 if "o_net" in name else 0.1)
    return model.eval()


@torch.no_grad()
def measure(task: Any, model: DEQTransformer, split: str = "val") -> dict[str, float]:
    """Return the metrics of a model in evaluation mode on a split."""
    return dict(task.evaluate(model.eval(), split).metrics)


def draw_ids(batch: int = 2, length: int = 6) -> torch.Tensor:
    return torch.randint(11, (batch, length), generator=torch.Generator().manual_seed(1))
