"""Random maps from a small grammar, each with the data that decides its fixed point.

A map is `f(z) = rho * g(z) + u(x)` where `g` is a chain of one to four pieces that do not expand
(`PIECES`), so `f` contracts within every branch. A draw is kept only if plain iteration converges
and every decision at the fixed point is clear, so that derivatives exist there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.properties.pieces import PIECES, B, D, Draw, Notes, Weights
from torchdeq import reset_norm

MARGIN = 1e-3  # the smallest margin of a clear decision
SETTLED = 1e-14  # the residual that counts as converged
LONGEST = 70  # the largest number of evaluations that plain iteration may need

Run = Callable[[Callable[..., Tensor], Tensor, tuple[Any, ...]], Tensor]

#: The ways in which f gets its tensors.
VIAS = ("leaf", "computed", "module", "args")
#: The start of the solve.
STARTS = ("zeros", "random", "of x", "of weights")


class Model(nn.Module):
    """A random map and its start; `forward` passes both to a function that solves."""

    def __init__(self, draw: Draw, names: tuple[str, ...], via: str, start: str) -> None:
        super().__init__()
        self.names, self.via, self.start = names, via, start
        self.weights, self.layers = nn.ParameterDict(), nn.ModuleDict()
        self.pieces = [PIECES[name](draw, self, f"{i}_{name}") for i, name in enumerate(names)]
        self.weights["u"] = nn.Parameter(draw.normal(D))
        self.rho = draw.choose.uniform(0.35, 0.55)
        self.begin = draw.choose.uniform(0.5, 2.0) * draw.normal(B, D)
        self.by_formula = False  # whether nested pieces compute by plain formulas
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
    """The end of a plain iteration that converged."""

    steps: int
    switched: bool  # whether a decision at the fixed point differs from that at the start


def settle(call: Callable[[Run], Tensor], model: Model) -> Settled | None:
    """Iterate to the fixed point; return None if it diverges or a decision there is not clear.

    Args:
        call: calls the model, with any parameters, with the loop that it should run.
        model: the model, in which the pieces note their decisions.
    """
    settled: list[Settled] = []

    def run(f: Callable[..., Tensor], z: Tensor, args: tuple[Any, ...]) -> Tensor:
        first = None
        for step in range(LONGEST):
            model.notes = Notes()
            fz = f(z, *args)
            notes, model.notes = model.notes, None
            first = notes if first is None else first
            if float((fz - z).norm()) < SETTLED * (1 + float(z.norm())):
                if notes.margin > MARGIN:
                    settled.append(Settled(step + 1, first.decisions != notes.decisions))
                break
            z = fz
        return z

    with torch.no_grad():
        model.by_formula = True
        call(run)
        model.by_formula = False
    return settled[0] if settled else None


def unroll(steps: int) -> Run:
    """Return plain iteration with a graph."""

    def run(f: Callable[..., Tensor], z: Tensor, args: tuple[Any, ...]) -> Tensor:
        for _ in range(steps):
            z = f(z, *args)
        return z

    return run


def sentences(draw: Draw) -> Iterator[tuple[str, ...]]:
    """Yield the names of pieces for one map after another, without end."""
    while True:
        names = draw.choose.choices(list(PIECES), k=draw.choose.choice((1, 2, 2, 3)))
        if not set(names) & {"tanh", "branch", "batch_experts", "row_experts", "scatter"}:
            names.append("tanh")  # without curvature all second derivatives are zero
        yield tuple(names)
