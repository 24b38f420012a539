"""A custom norm: bound the row sums, so that the layer contracts in the max norm.

The program registers the norm under a name, for `apply_norm` and the flag `--norm_type`, and then
registers a class of modules that the norm should normalise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from torchdeq import apply_norm, get_deq, register_norm, register_norm_module, reset_norm
from torchdeq.norm import Norm


@dataclass(frozen=True)
class RowSumNorm(Norm):
    r"""A norm that scales the absolute values of every row to a sum, which bounds $\|W\|_\infty$.

    $$W_i = v_i \min(t, g_i / \|v_i\|_1)$$
    """

    _target_modules: ClassVar = {nn.Linear: ("weight", 0)}  # class: (parameter, its rows)
    suffixes: ClassVar = ("g", "v")  # the parameters are weight_g and weight_v
    raw: ClassVar = "v"

    def split(self, weight: Tensor, dim: int) -> dict[str, Tensor]:
        return {"g": _row_sums(weight, dim), "v": weight} if self.learn_scale else {"v": weight}

    def weight(self, parts: dict[str, Tensor], dim: int) -> Tensor:
        return self._scale(parts["v"], _row_sums(parts["v"], dim), parts.get("g"))


def _row_sums(v: Tensor, dim: int) -> Tensor:
    others = [d for d in range(v.dim()) if d != dim]
    return v.abs().sum(dim=others, keepdim=True)


class Mixer(nn.Module):
    """A linear map that is not an `nn.Linear`: a row times a matrix, outputs in its columns."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(width, width))

    def forward(self, z: Tensor) -> Tensor:
        return z @ self.mix


def main() -> None:
    torch.manual_seed(0)
    register_norm("row_sum_norm", RowSumNorm)
    register_norm_module(Mixer, "row_sum_norm", names="mix", dims=1)
    x = torch.randn(16, 64)
    deq = get_deq(f_max_iter=100, f_tol=1e-5, on_failure="ignore").eval()
    for target in (None, 0.9, 0.5):
        layer = Mixer(64)
        if target is not None:
            apply_norm(layer, "row_sum_norm", learn_scale=False, target_norm=target)
        with torch.no_grad():
            reset_norm(layer)
            _, stats = deq(lambda z, f=layer: torch.tanh(f(z) + x), torch.zeros_like(x))
        sums = layer.mix.abs().sum(0)
        print(f"row sums up to {sums.max():5.2f}: {stats.summary()}")


if __name__ == "__main__":
    main()
