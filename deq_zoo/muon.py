"""Muon for matrices beside AdamW for all other weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from deq_zoo.model import Model
from deq_zoo.optim import Optim, Schedule, Trapezoid

#: Coefficients of the five steps that bring singular values near 1.
_STEPS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
_SECOND_MOMENT = 0.05  # share of the newest squares in their mean
_TINY = 1e-10
_PUBLISHED = Trapezoid()


@dataclass(frozen=True)
class Muon(Optim):
    """Muon for the matrices of explicit layers, AdamW for all other weights.

    Published with the attractor: each matrix of the update has its singular values brought near 1,
    is balanced by a mean of squares over rows or columns, and decays only weights whose sign agrees
    with it. As published, matrices that an equilibrium uses are left to AdamW.

    Args:
        lr: learning rate of AdamW for tables and vectors outside the equilibrium.
        matrix_lr: learning rate of Muon.
        core_factor: rate of the weights that the equilibrium uses, relative to `lr`.
        betas: decay rates of AdamW's means of the gradient and of its square.
        eps: number added to the root of the squared gradient's mean.
        weight_decay: strength of Muon's weight decay; it falls linearly to 0 over the run.
        core_decay: strength of the weight decay of matrices that the equilibrium uses.
        core_muon: change the matrices that the equilibrium uses by Muon, too, with its weight decay
            and with `core_factor` of its rate.
        momentum: of Muon after the first updates.
        momentum_start: of Muon at the first update.
        momentum_updates: updates in which the momentum rises.
        schedule: the learning rate over the run.
    """

    lr: float = 8e-3
    matrix_lr: float = 8e-3
    core_factor: float = 0.5
    betas: tuple[float, float] = (0.8, 0.95)
    eps: float = 1e-10
    weight_decay: float = 0.2
    core_decay: float = 0.1
    core_muon: bool = False
    momentum: float = 0.95
    momentum_start: float = 0.85
    momentum_updates: int = 300
    schedule: Schedule = _PUBLISHED

    needs_whole_matrices: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.core_muon and self.core_decay != Muon.core_decay:
            raise ValueError(
                f"core_decay={self.core_decay} would have no effect: with core_muon=true these "
                "matrices have weight_decay; drop it"
            )

    def make(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return an optimiser of weights of which nothing is known but their shapes."""
        weights = list(parameters)
        by_kind = {
            "matrix": [p for p in weights if p.dim() == 2],
            "vector": [p for p in weights if p.dim() != 2],
        }
        return self._make(by_kind)

    def make_for(self, model: Model) -> torch.optim.Optimizer:
        """Return an optimiser of a model's weights, by what `Model.weight_kind` says of them."""
        by_kind: dict[str, list[nn.Parameter]] = defaultdict(list)
        for name, p in model.named_parameters():
            if p.requires_grad:
                by_kind[model.weight_kind(name)].append(p)
        return self._make(by_kind)

    def _make(self, by_kind: dict[str, list[nn.Parameter]]) -> MuonAdamW:
        core = self.lr * self.core_factor
        core_matrix: tuple[str, str, float, float] = (
            ("core_matrix", "muon", self.matrix_lr * self.core_factor, self.weight_decay)
            if self.core_muon
            else ("core_matrix", "adamw", core, self.core_decay)
        )
        groups = (
            ("vector", "adamw", self.lr, 0.0),
            ("core_vector", "adamw", core, 0.0),
            core_matrix,
            ("matrix", "muon", self.matrix_lr, self.weight_decay),
        )
        return MuonAdamW(
            [
                {
                    "params": by_kind[kind],
                    "rule": rule,
                    "lr": rate,
                    "base_lr": rate,
                    "weight_decay": decay,
                    "momentum": self.momentum,
                    "betas": self.betas,
                    "eps": self.eps,
                }
                for kind, rule, rate, decay in groups
                if by_kind.get(kind)
            ]
        )

    def set_rate(self, optimizer: torch.optim.Optimizer, step: int, steps: int) -> float:
        rise = min(step / max(1, self.momentum_updates), 1.0)
        for group in optimizer.param_groups:
            if group["rule"] == "muon":
                start = self.momentum_start
                group["momentum"] = start + rise * (self.momentum - start)
                group["weight_decay"] = self.weight_decay * (1 - step / max(1, steps))
        return super().set_rate(optimizer, step, steps)


class MuonAdamW(torch.optim.Optimizer):
    """The optimiser of `Muon`: groups have a `rule`, `muon` or `adamw`.

    Args:
        groups: with `params`, `rule`, `lr`, `weight_decay`, `momentum`, `betas` and `eps`.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Change the weights by their gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            if group["rule"] == "adamw":
                for p in weights:
                    self._adamw(p, group)
            else:
                by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
                for p in weights:
                    by_shape[p.shape].append(p)
                for same in by_shape.values():
                    self._muon(same, group)
        return loss

    def _adamw(self, p: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        assert p.grad is not None
        state["step"] += 1
        k, (b1, b2) = int(state["step"]), group["betas"]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        state["exp_avg"].lerp_(p.grad, 1 - b1)
        state["exp_avg_sq"].lerp_(p.grad.square(), 1 - b2)
        size = (state["exp_avg_sq"] / (1 - b2**k)).sqrt_().add_(group["eps"])
        p.addcdiv_(state["exp_avg"], size, value=-group["lr"] / (1 - b1**k))

    def _muon(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        """Change matrices of one shape."""
        rows, columns = weights[0].shape
        for p in weights:
            if not self.state[p]:
                shape = (rows, 1) if rows >= columns else (1, columns)
                self.state[p]["momentum"] = torch.zeros_like(p)
                self.state[p]["squares"] = p.new_zeros(shape)
        mu, updates = group["momentum"], []
        for p in weights:
            assert p.grad is not None
            mean = self.state[p]["momentum"].lerp_(p.grad, 1 - mu)
            updates.append(p.grad.lerp(mean, mu))
        x = orthogonalised(torch.stack(updates))
        squares = torch.stack([self.state[p]["squares"] for p in weights])
        x, squares = _balanced(x, squares)
        rate = group["lr"] * max(1.0, rows / columns) ** 0.5
        for p, update, s in zip(weights, x, squares, strict=True):
            self.state[p]["squares"].copy_(s)
            decay = torch.where(update * p >= 0, p, 0.0)
            p.sub_(update.add(decay, alpha=group["weight_decay"]), alpha=rate)


def orthogonalised(g: Tensor) -> Tensor:
    """Return matrices (..., r, q) with the singular vectors of `g`, and singular values near 1."""
    rows, columns = g.shape[-2:]
    x: Tensor = g / (1.02 * g.norm(dim=(-2, -1), keepdim=True) + 1e-6)
    for a, b, c in _STEPS:
        gram = x.mT @ x if rows > columns else x @ x.mT
        inner = b * gram + c * (gram @ gram)
        x = a * x + (x @ inner if rows > columns else inner @ x)
    return x


def _balanced(x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Return matrices divided by the root of a mean of squares, with their norms kept.

    Args:
        x: (n, r, q) the matrices.
        mean: (n, r, 1) or (n, 1, q), the mean of squares over the other dimension so far.

    Returns:
        The matrices, and the new mean.
    """
    over = -1 if mean.shape[-1] == 1 else -2
    squares, count = x.square().mean(over, keepdim=True), x.shape[over]
    mean = torch.lerp(mean, squares, _SECOND_MOMENT)
    factor = mean.clamp_min(_TINY).rsqrt()
    before = (count * squares.sum((-2, -1), keepdim=True)).sqrt()
    after = (count * (squares * factor.square()).sum((-2, -1), keepdim=True)).sqrt()
    return x * factor * (before / after.clamp_min(_TINY)), mean
