"""AdamATan2, the optimiser of the published reasoners, and its learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import cos, pi
from typing import Any

import torch
from torch import Tensor, nn

from deq_zoo.errors import ZooError
from deq_zoo.optim import Optim, Schedule


@dataclass(frozen=True)
class LateCosine(Schedule):
    """A linear rise over `warmup` updates, then half a cosine from 1 to `floor`.

    Updates count from 1, so the cosine is one update ahead of that of `Cosine`.

    Args:
        warmup: updates in which the rate rises.
        floor: rate at the end, relative to the highest; 1 keeps the rate.
    """

    warmup: int = 2000
    floor: float = 1.0

    def factor(self, step: int, steps: int) -> float:
        t = step + 1
        if t < self.warmup:
            return t / self.warmup
        share = (t - self.warmup) / max(1, steps - self.warmup)
        return self.floor + max(0.0, (1 - self.floor) * 0.5 * (1 + cos(pi * share)))


@dataclass(frozen=True)
class AdamATan2(Optim):
    """Adam without epsilon, by the arc tangent; puzzles' own vectors follow the sign of a gradient.

    Args:
        lr: learning rate.
        betas: decay rates of the means of the gradient and of its square.
        weight_decay: strength of the weight decay, on all weights.
        table_lr: learning rate of the puzzles' own vectors.
        table_weight_decay: strength of their weight decay.
        schedule: the learning rate over the run.
    """

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 1.0
    table_lr: float = 1e-4
    table_weight_decay: float = 1.0
    schedule: Schedule = field(default_factory=LateCosine)

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        weights = list(parameters)
        if any(hasattr(p, "to_local") for p in weights):
            raise ZooError(
                "AdamATan2 cannot tell puzzles' own vectors from other weights once they are "
                "sharded: use parallel=ddp, or optim of another kind"
            )
        tables = [p for p in weights if isinstance(p, PuzzleRows)]
        others = [p for p in weights if not isinstance(p, PuzzleRows)]
        groups = [
            {"params": others, "base_lr": self.lr, "weight_decay": self.weight_decay},
            {
                "params": tables,
                "base_lr": self.table_lr,
                "weight_decay": self.table_weight_decay,
                "by_sign": True,
            },
        ]
        return ATan2(groups if tables else groups[:1], self.lr, self.betas)


class PuzzleRows(nn.Parameter):
    """Puzzles' own vectors (ids, k), of which a step changes only the rows that were used."""


class ATan2(torch.optim.Optimizer):
    r"""AdamATan2 as a torch optimiser.

    $$p \leftarrow (1 - \eta w)\,p - \frac{\eta}{1 - \beta_1^t}
    \operatorname{atan2}\Big(m, \sqrt{v / (1 - \beta_2^t)}\Big)$$

    with the means $m$ and $v$ of the gradient and of its square. A group with `by_sign` steps by
    the sign of the gradient; there, rows without any gradient were not used, and stay as they are.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        betas: decay rates of the means.
        weight_decay: strength of the weight decay.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "by_sign": False}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        for group in self.param_groups:
            update = self._step_by_sign if group["by_sign"] else self._step
            for p in group["params"]:
                if p.grad is not None:
                    update(p, p.grad, group)
        return value

    def _step(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        state, lr, (beta1, beta2) = self.state[p], group["lr"], group["betas"]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        t, m, v = float(state["step"]), state["exp_avg"], state["exp_avg_sq"]
        p.mul_(1 - lr * group["weight_decay"])
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        p.sub_(torch.atan2(m, v.sqrt() / (1 - beta2**t) ** 0.5), alpha=lr / (1 - beta1**t))

    @staticmethod
    def _step_by_sign(p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        used = (g != 0).any(dim=1, keepdim=True)
        p.copy_(torch.where(used, step_rows(p, g, group["lr"], group["weight_decay"]), p))


def step_rows(rows: Tensor, g: Tensor, lr: float, weight_decay: float) -> Tensor:
    """Return rows after a decay and a step against the sign of their gradient."""
    return rows * (1 - lr * weight_decay) - lr * g.sign()
