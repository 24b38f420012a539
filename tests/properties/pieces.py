"""The pieces of random maps: operations that do not expand, and the random numbers behind them.

Pieces may decide by `z` which tensors they use, differentiate inside, mix the rows of the batch, or
select a number of entries that depends on the data.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchdeq import VariationalDropout, apply_norm

if TYPE_CHECKING:
    from tests.properties.grammar import Model

B, D = 3, 4
DOUBLE = torch.float64

Weights = Mapping[str, Tensor]


class Draw:
    """Random choices and random numbers from one seed."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=DOUBLE)

    def matrix(self, rows: int = D, norm: float = 0.9) -> Tensor:
        """Return a square matrix of the given spectral norm."""
        A = self.normal(rows, rows)
        return norm * A / torch.linalg.matrix_norm(A, 2)


@dataclass
class Notes:
    """The decisions of all pieces in one call, and the smallest margin of any of them."""

    decisions: list[Any] = field(default_factory=list)
    margin: float = float("inf")

    def decide(self, decision: Any, margin: Tensor) -> None:
        self.decisions.append(decision)
        self.margin = min(self.margin, float(margin.abs().min()))


class Piece:
    """A map of a (B, D) state whose norm is at most about 1.

    A nested piece computes the same by a plain formula if `model.by_formula` is set.
    """

    nested = False  # whether it differentiates or recomputes inside
    couples = False  # whether rows depend on each other
    decides = False  # whether the tensors in use depend on z

    def __init__(self, draw: Draw, model: Model, name: str) -> None:
        self.name = name

    def own(self, model: Model, part: str, value: Tensor) -> str:
        """Add a parameter to the model and return its name."""
        key = f"{self.name}_{part}"
        model.weights[key] = nn.Parameter(value)
        return key

    def call(self, z: Tensor, x: Tensor, w: Weights, model: Model) -> Tensor:
        raise NotImplementedError


class Affine(Piece):
    def __init__(self, draw: Draw, model: Model, name: str) -> None:
        super().__init__(draw, model, name)
        self.W, self.b = self.own(model, "W", draw.matrix()), self.own(model, "b", draw.normal(D))

    def call(self, z: Tensor, x: Tensor, w: Weights, model: Model) -> Tensor:
        return z @ w[self.W].mT + w[self.b]


class Tanh(Piece):
    def __init__(self, draw: Draw, model: Model, name: str) -> None:
        super().__init__(draw, model, name)
        self.b = self.own(model, "b", 0.3 * draw.normal(D))

    def call(self, z: Tensor, x: Tensor, w: Weights, model: Model) -> Tensor:
        return torch.tanh(z + w[self.b])


class Branch(Piece):
    """Python's `if` on the size of the whole state."""

    decides = True

    def __init__(self, draw: Draw, model: Model, name: str) -> None:
        super().__init__(draw, model, name)
        self.near, self.far = (self.own(model, part, draw.matrix()) for part in ("near", "far"))
        self.c = draw.choose.uniform(0.5, 3.0)

    def call(self, z: Tensor, x: Tensor, w: Weights, model: Model) -> Tensor:
        size = z.norm()
        near = bool(size < self.c)
        if model.notes is not None:
            model.notes.decide(near, size - self.c)
        return torch.tanh(z @ w[self.near]) if near else torch.sin(z @ w[self.far])


class Mask(Piece):
    """`torch.where` on every entry."""

    decides = True

    def __init__(self, draw: Draw, model: Model, name: str) -> None:
        super().__init__(draw, model, name)
        self.s = self.own(model, "s", draw.normal(D).clamp(-0.9, 0.9))
        self.c = draw.choose.uniform(-0.3, 0.3)

    def call(self, z: Tensor, x: Tensor, w: Weights, model: Model) -> Tensor:
        above = z > self.c
        if model.notes is not None:
            model.notes.decide(above.tolist(), z - self.c)
        return torch.where(above, torch.sin(z), w[self.s] * z)


class BatchExperts(Piece):
    """One expert for the whole batch, by the largest column sum: the others are not called."""

    decides = True

    def __init__(self, draw: Draw, model: Model, name: str) -> None:
        super().__init__(draw, model, name)
        self.experts = [self.own(model, f"expert{i}", draw.matrix()) for i in range(D)]

    def call(self, z: Tensor, x: Tensor, w: Weights, model: Model) -> Tensor:
        score = z.sum(0)
        chosen = int(score.argmax())
        if model.notes is not None:
            top = score.topk(2).values
            model.notes.decide(chosen, top[0] - top[1])
        return torch.tanh(z @ w[self.experts[chosen]])


class RowExperts(Piece):
    """One expert for each row; an expert without rows is not called."""

    decides = True

    def __init__(self, draw: Draw, model: Model, name: str) -> None:
        super().__init__(draw, model, name)
        self.experts = [self.own(model, f"expert{i}", draw.matrix()) for i in range(3)]
        self.R = draw.normal(D, 3)

    def call(self, z: Tensor, x: Tensor, w: Weights, model: Model) -> Tensor:
        score = z @ self.R
        route = score.argmax(1)
        if model.notes is not None:
            top = score.topk(2, dim=1).values
            model.notes.decide(route.tolist(), top[:, 0] - top[:, 1])
        out = torch.zeros_like(z)
        for i, expert in enumerate(self.experts):
            rows = (route == i).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, torch.tanh(z.index_select(0, rows) @ w[expert]))
        return out


class Gather(Piece):
    def __init__(self, draw: Draw, model: Model, name: str) -> None:
        super().__init__(draw, model, name)
        self.index = torch.randint(D, (B, D), generator=draw.generator)
        self.s = self.own(model, "s", 0.5 * torch.tanh(draw.normal(D)))

    def call(self, z: Tensor, x: Tensor, w: Weights, model: Model) -> Tensor:
        return w[self.s] * torch.gather(z, 1, self.index)


class Scatter(Gather):
    def call(self, z: Tensor, x: Tensor, w: Weights, model: Model) -> Tensor:
        return torch.zeros_like(z).scatter_add(1, self.index, w[self.s] * torch.sin(z))


class Selection(Piece):
    """The entries above a bound, changed together and put back."""

    decides = True

    def __init__(self, draw: Draw, model: Model, name: str) -> None:
        super().__init__(draw, model, name)
        self.a = self.own(model, "a", draw.normal(1).clamp(-0.9, 0.9))
        self.c = draw.choose.uniform(-0.3, 0.3)
        self.by_index = draw.choose.random() < 0.5

    def call(self, z: Tensor, x: Tensor, w: Weights, model: Model) -> Tensor:
        above = z > self.c
        if model.notes is not None:
            model.notes.decide(above.tolist(), z - self.c)
        if self.by_index:
            at = tuple(above.nonzero().mT)
            return z.index_put(at, torch.sin(z[at] * w[self.a]))
        return z.masked_scatter(above, torch.tanh(z.masked_select(above) * w[self.a]))


class Nested(Piece):
    """A piece with one matrix that differentiates or recomputes inside."""

    nested = True

    def __init__(self, draw: Draw, model: Model, name: str) -> None:
        super().__init__(draw, model, name)
        self.W = self.own(model, "W", draw.matrix())


class Energy(Nested):
    """The gradient of an energy by `torch.func.grad`, which equals `W tanh(W' z)`."""

    def call(self, z: Tensor, x: Tensor, w: Weights, model: Model) -> Tensor:
        if model.by_formula:
            return torch.tanh(z @ w[self.W]) @ w[self.W].mT
        gradient: Tensor = torch.func.grad(lambda y: torch.cosh(y @ w[self.W]).log().sum())(z)
        return gradient


class InnerAutograd(Energy):
    """The gradient of an energy by `torch.autograd.grad` with `create_graph`."""

    def call(self, z: Tensor, x: Tensor, w: Weights, model: Model) -> Tensor:
        if model.by_formula:
            return super().call(z, x, w, model)
        with torch.enable_grad():
            y = z.clone()
            if not y.requires_grad:
                y.requires_grad_()
            energy = torch.cosh(y @ w[self.W]).log().sum()
            return torch.autograd.grad(energy, y, create_graph=True)[0]


class Checkpointed(Nested):
    """A layer whose activations are recomputed in the backward pass."""

    def call(self, z: Tensor, x: Tensor, w: Weights, model: Model) -> Tensor:
        layer = lambda y: torch.sin(y @ w[self.W])  # noqa: E731
        return layer(z) if model.by_formula else checkpoint(layer, z, use_reentrant=False)


class Mixing(Piece):
    """Every row is a mixture of all rows."""

    couples = True

    def __init__(self, draw: Draw, model: Model, name: str) -> None:
        super().__init__(draw, model, name)
        self.M = self.own(model, "M", draw.matrix(B, 0.95))

    def call(self, z: Tensor, x: Tensor, w: Weights, model: Model) -> Tensor:
        return w[self.M] @ z


class Chain(Piece):
    """Row i depends on row i - 1 alone."""

    couples = True

    def __init__(self, draw: Draw, model: Model, name: str) -> None:
        super().__init__(draw, model, name)
        self.W = self.own(model, "W", draw.matrix(norm=1.0))

    def call(self, z: Tensor, x: Tensor, w: Weights, model: Model) -> Tensor:
        return torch.cat((0.5 * x[:1], torch.tanh(z[:-1] @ w[self.W])))


class Dropout(Piece):
    """Variational dropout whose mask is drawn once."""

    def __init__(self, draw: Draw, model: Model, name: str) -> None:
        super().__init__(draw, model, name)
        drop = VariationalDropout(0.25)
        drop.mask = 0.9 * (torch.rand(B, D, generator=draw.generator) < 0.75).double()
        model.layers[name] = drop

    def call(self, z: Tensor, x: Tensor, w: Weights, model: Model) -> Tensor:
        return model.layers[self.name](z)


class Normed(Piece):
    """A layer with weight or spectral norm, computed once per forward pass."""

    def __init__(self, draw: Draw, model: Model, name: str) -> None:
        super().__init__(draw, model, name)
        layer = nn.Linear(D, D).double()
        with torch.no_grad():
            layer.weight.copy_(draw.matrix(norm=0.8))
            layer.bias.copy_(draw.normal(D))
        kind = draw.choose.choice(("weight_norm", "spectral_norm"))
        options: dict[str, Any] = {"target_norm": 0.8} if kind == "spectral_norm" else {}
        apply_norm(layer, kind, **options)
        layer.eval()  # keeps the vectors of the power iteration
        model.layers[name] = layer

    def call(self, z: Tensor, x: Tensor, w: Weights, model: Model) -> Tensor:
        return model.layers[self.name](z)


PIECES: dict[str, type[Piece]] = {
    "affine": Affine,
    "tanh": Tanh,
    "branch": Branch,
    "mask": Mask,
    "batch_experts": BatchExperts,
    "row_experts": RowExperts,
    "gather": Gather,
    "scatter": Scatter,
    "selection": Selection,
    "energy": Energy,
    "autograd": InnerAutograd,
    "checkpoint": Checkpointed,
    "mixing": Mixing,
    "chain": Chain,
    "dropout": Dropout,
    "norm": Normed,
}
