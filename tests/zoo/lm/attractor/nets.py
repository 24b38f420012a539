"""Small attractors for tests."""

from __future__ import annotations

from typing import Any

import torch

from deq_zoo.lm.attractor.model import Attractor
from deq_zoo.lm.config import LMConfig
from tests.zoo.lm.attractor.golden import TIGHT


def make_config(**changes: Any) -> LMConfig:
    shape: dict[str, Any] = {
        "design": "attractor",
        "tokens": 11,
        "width": 8,
        "heads": 2,
        "inner": 12,
        "backbone": 2,
        "blocks": 2,
        "dropout": 0.0,
        "core_start": "random",
    }
    return LMConfig(**(shape | changes))


def make_model(deq: Any = None, **changes: Any) -> Attractor:
    """Build an attractor in float64 whose backbone does something, too."""
    torch.manual_seed(0)
    model = Attractor(make_config(**changes), TIGHT if deq is None else deq).double()
    with torch.no_grad():
        for name, p in model.prelude.named_parameters():
            if name.endswith(("c_proj.weight", "mlp.proj.weight")):
                p.normal_(std=0.3)
    return model.eval()


def draw_ids(batch: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(11, (batch, length), generator=torch.Generator().manual_seed(1))
