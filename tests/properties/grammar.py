"""Random maps from a small grammar, each with the data that decides its fixed point.

A map is `f(z) = rho * g(z) + u(x)` where `g` is a chain of one to four pieces that do not expand
(`PIECES`), so `f` contracts within every branch. Pieces may decide by `z` which tensors they use,
differentiate inside, mix the rows of the batch, or select a number of entries that depends on the
data. A draw is kept only if plain iteration converges and every decision at the fixed point is
clear, so that derivatives exist there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchdeq import VariationalDropout, apply_norm, reset_norm

B, D = 3, 4
DOUBLE = torch.float64
MARGIN = 1e-3  # how clear a decision at the fixed point must be
SETTLED = 1e-14  # the residual that counts as converged
LONGEST = 70  # evaluations of plain iteration that a map may need for it

Weights = Mapping[str, Tensor]
Run = Callable[[Callable[..., Tensor], Tensor, tuple[Any, ...]], Tensor]


class Draw:
    """Random choices and random numbers from one seed."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=DOUBLE)

    def matrix(self, rows: int = D, norm: float = 0.9) -> Tensor:
        """A square matrix of the given spectral norm."""
        A = self.normal(rows, rows)
        return norm * A / torch.linalg.matrix_norm(A, 2)


@dataclass
class Notes:
    """What the pieces decided in one call, and how clearly."""

    decisions: list[Any] = field(default_factory=list)
    margin: float = float("inf")

    def decide(self, decision: Any, margin: Tensor) -> None:
        self.decisions.append(decision)
        self.margin = min(self.margin, float(margin.abs().min()))


class Piece:
    """A map of a (B, D) state that expands nothing. Subclasses say what it does."""

    #: Other code that must compute the same is in `call` under `model.twin`.
    nested = False  # differentiates or recomputes inside
    couples = False  # rows depend on each other
    decides = False  # the tensors in use depend on z

    def __init__(self, draw: Draw, model: Model, name: str) -> None:
        self.name = name

    def own(self, model: Model, part: str, value: Tensor) -> str:
        """Give the model a parameter; return its name."""
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


class Scatter(Piece):
    def __init__(self, draw: Draw, model: Model, name: str) -> None:
        super().__init__(draw, model, name)
        self.index = torch.randint(D, (B, D), generator=draw.generator)
        self.s = self.own(model, "s", 0.5 * torch.tanh(draw.normal(D)))

    def call(self, z: Tensor, x: Tensor, w: Weights, model: Model) -> Tensor:
        return torch.zeros_like(z).scatter_add(1, self.index, w[self.s] * torch.sin(z))


class Selection(Piece):
    """As many entries as are above a bound, changed together and put back."""

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


class Energy(Piece):
    """The gradient of an energy by `torch.func.grad`: `W tanh(W' z)` in disguise."""

    nested = True

    def __init__(self, draw: Draw, model: Model, name: str) -> None:
        super().__init__(draw, model, name)
        self.W = self.own(model, "W", draw.matrix())

    def call(self, z: Tensor, x: Tensor, w: Weights, model: Model) -> Tensor:
        if model.twin:
            return torch.tanh(z @ w[self.W]) @ w[self.W].mT
        gradient: Tensor = torch.func.grad(lambda y: torch.cosh(y @ w[self.W]).log().sum())(z)
        return gradient


class InnerAutograd(Energy):
    """The same by `torch.autograd.grad` with `create_graph`."""

    def call(self, z: Tensor, x: Tensor, w: Weights, model: Model) -> Tensor:
        if model.twin:
            return super().call(z, x, w, model)
        with torch.enable_grad():
            y = z.clone()
            if not y.requires_grad:
                y.requires_grad_()
            energy = torch.cosh(y @ w[self.W]).log().sum()
            return torch.autograd.grad(energy, y, create_graph=True)[0]


class Checkpointed(Piece):
    """A layer whose activations are computed again in the backward pass."""

    nested = True

    def __init__(self, draw: Draw, model: Model, name: str) -> None:
        super().__init__(draw, model, name)
        self.W = self.own(model, "W", draw.matrix())

    def call(self, z: Tensor, x: Tensor, w: Weights, model: Model) -> Tensor:
        layer = lambda y: torch.sin(y @ w[self.W])  # noqa: E731
        return layer(z) if model.twin else checkpoint(layer, z, use_reentrant=False)


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
        layer.eval()  # the vectors of the power iteration stay
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
#: How f comes by its tensors.
VIAS = ("leaf", "computed", "module", "args")
#: Where the solve starts.
STARTS = ("zeros", "random", "of x", "of weights")


class Model(nn.Module):
    """A random map and its start; `forward` hands both to whoever solves."""

    def __init__(self, draw: Draw, names: tuple[str, ...], via: str, start: str) -> None:
        super().__init__()
        self.names, self.via, self.start = names, via, start
        self.weights, self.layers = nn.ParameterDict(), nn.ModuleDict()
        self.pieces = [PIECES[name](draw, self, f"{i}_{name}") for i, name in enumerate(names)]
        self.weights["u"] = nn.Parameter(draw.normal(D))
        self.rho = draw.choose.uniform(0.35, 0.55)
        self.begin = draw.choose.uniform(0.5, 2.0) * draw.normal(B, D)
        self.twin = False
        self.notes: Notes | None = None

    @property
    def nested(self) -> bool:
        return any(piece.nested for piece in self.pieces)

    @property
    def couples(self) -> bool:
        return any(piece.couples for piece in self.pieces)

    @property
    def decides(self) -> bool:
        return any(piece.decides for piece in self.pieces)

    def forward(self, x: Tensor, run: Run) -> Tensor:
        reset_norm(self)
        names = list(self.weights)
        tensors = [self.weights[name] for name in names]
        if self.via == "computed":
            tensors = [t * torch.cos(0.1 * t.mean()) for t in tensors]
        inputs = (*tensors, x) if self.via == "args" else ()

        def f(z: Tensor, *args: Tensor) -> Tensor:
            w: Weights = dict(zip(names, args or tensors, strict=False))
            v = args[-1] if args else x
            if self.via == "module":
                w = dict(self.weights.items())
            y = z
            for piece in self.pieces:
                y = piece.call(y, v, w, self)
            return self.rho * y + torch.tanh(v + w["u"])

        z0 = self.begin if self.start in ("random", "of x", "of weights") else 0 * self.begin
        if self.start == "of x":
            z0 = z0 + x
        if self.start == "of weights":
            z0 = z0 * tensors[0].flatten()[:1]
        return run(f, z0, inputs)


@dataclass(frozen=True)
class Settled:
    """How plain iteration of a map ended."""

    steps: int
    switched: bool  # a decision at the fixed point is not the one at the start


def settle(call: Callable[[Run], Tensor], model: Model) -> Settled | None:
    """Iterate to the fixed point; None if there is none, or a decision there is not clear.

    Args:
        call: hands the map and its start to a loop: the model, with whichever parameters.
        model: where the pieces note their decisions.
    """
    found: list[Settled] = []

    def run(f: Callable[..., Tensor], z: Tensor, args: tuple[Any, ...]) -> Tensor:
        first = None
        for step in range(LONGEST):
            model.notes = Notes()
            fz = f(z, *args)
            notes, model.notes = model.notes, None
            first = notes if first is None else first
            if float((fz - z).norm()) < SETTLED * (1 + float(z.norm())):
                if notes.margin > MARGIN:
                    found.append(Settled(step + 1, first.decisions != notes.decisions))
                break
            z = fz
        return z

    with torch.no_grad():
        model.twin = True
        call(run)
        model.twin = False
    return found[0] if found else None


def unroll(steps: int) -> Run:
    """Plain iteration with a graph."""

    def run(f: Callable[..., Tensor], z: Tensor, args: tuple[Any, ...]) -> Tensor:
        for _ in range(steps):
            z = f(z, *args)
        return z

    return run


def sentences(draw: Draw) -> Iterator[tuple[str, ...]]:
    """Chains of pieces, without end."""
    while True:
        names = draw.choose.choices(list(PIECES), k=draw.choose.choice((1, 2, 2, 3)))
        if not set(names) & {"tanh", "branch", "batch_experts", "row_experts", "scatter"}:
            names.append("tanh")  # without curvature nothing is to be seen at the second order
        yield tuple(names)
