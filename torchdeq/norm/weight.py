"""Weight normalisation: each row is a direction times a learnable length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchdeq.norm.base import NORMS, Norm
from torchdeq.norm.computed import Parts
from torchdeq.norm.targets import Targets, common_targets


@NORMS.register("weight_norm")
@dataclass(frozen=True)
class WeightNorm(Norm):
    r"""Weight normalisation (Salimans and Kingma, 2016).

    $$W_i = v_i \min(t, g_i / \|v_i\|)$$

    for every row $i$ along the dimension in `dims`. `g` starts at the lengths of the rows, so that
    the layer computes the same function as before. Parameters: `weight_g` and `weight_v`. The
    options are those of `Norm`.
    """

    _target_modules: ClassVar[Targets] = common_targets()
    suffixes: ClassVar[tuple[str, ...]] = ("g", "v")
    raw: ClassVar[str] = "v"
    keeps_weight: ClassVar[bool] = True

    def split(self, weight: Tensor, dim: int) -> Parts:
        return {"g": _lengths(weight, dim), "v": weight} if self.learn_scale else {"v": weight}

    def weight(self, parts: Parts, dim: int) -> Tensor:
        v = parts["v"]
        return self._scale(v, _lengths(v, dim), parts.get("g"))


def _lengths(v: Tensor, dim: int) -> Tensor:
    """Return the Euclidean norms of the rows, with every other dimension of size 1."""
    others = [d for d in range(v.dim()) if d != dim % v.dim()]
    if not others:
        return v.abs()  # each row is one number; an empty list would mean all dimensions
    lengths: Tensor = torch.linalg.vector_norm(v, dim=others, keepdim=True)
    return lengths
