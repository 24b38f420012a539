"""Update rules in a graph: plain iteration and Anderson acceleration, as bodies of a loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from torchdeq.export.leaves import Leaves, dots, spread
from torchdeq.numbers import norm_dtype, small_dtype
from torchdeq.solver import Anderson, FixedPointIter, SimpleFixedPointIter, Solver
from torchdeq.solver.image_window import TINY
from torchdeq.solver.window import LEAST_LAM

#: The solvers that a graph can hold.
EXPORTABLE = (FixedPointIter, SimpleFixedPointIter, Anderson)


class Rule(Protocol):
    """An update rule; its memory is a tuple of tensors that a loop carries."""

    def start(self, z0: Leaves) -> Leaves:
        """Return the memory before the first evaluation."""
        ...

    def answer(self, z: Leaves, fz: Leaves) -> Leaves:
        """Return the answer at an iterate."""
        ...

    def next(self, memory: Leaves, k: Tensor, z: Leaves, fz: Leaves) -> tuple[Leaves, Leaves]:
        """Return the next point and the memory, after iterate `k` = 0, 1, ...."""
        ...


def make_rule(solver: Solver[Any], joint: bool) -> Rule:
    """Return the rule of a solver in a graph; raise `ValueError` for a solver without one.

    Args:
        solver: the solver.
        joint: whether the batch is one sample.
    """
    if isinstance(solver, (FixedPointIter, SimpleFixedPointIter)):
        return Damped(solver.tau)
    if isinstance(solver, Anderson):
        given = {"type": solver.type != 2, "restart": solver.restart}
        given["safeguard"] = solver.safeguard is not None
        refused = [f"{name}={getattr(solver, name)}" for name, set_ in given.items() if set_]
        if refused:
            raise ValueError(
                f"Anderson cannot be exported with {', '.join(refused)}: a graph has type 2 "
                "without restart and safeguard; pass solver=Anderson(m=...)"
            )
        return Mixing(solver, joint)
    names = ", ".join(kind.__name__ for kind in EXPORTABLE)
    raise ValueError(
        f"{type(solver).__name__} cannot be exported: a graph can hold {names}; choose one of them "
        "with solver=, e.g. solver=Anderson()"
    )


def check_solver(solver: Solver[Any]) -> None:
    """Raise `ValueError` for a solver that a graph cannot hold."""
    make_rule(solver, joint=False)


@dataclass(frozen=True)
class Damped:
    """Plain iteration, see `FixedPointIter`."""

    tau: float

    def start(self, z0: Leaves) -> Leaves:
        """Return nothing: the point is all that the iteration knows."""
        return ()

    def answer(self, z: Leaves, fz: Leaves) -> Leaves:
        """Return the damped image."""
        if self.tau == 1:
            return fz
        return tuple(torch.lerp(a, b, self.tau) for a, b in zip(z, fz, strict=True))

    def next(self, memory: Leaves, k: Tensor, z: Leaves, fz: Leaves) -> tuple[Leaves, Leaves]:
        """Return a copy of the answer: a loop may not carry what `f` still refers to."""
        return tuple(t.clone() for t in self.answer(z, fz)), ()


@dataclass(frozen=True)
class Mixing:
    r"""Anderson acceleration of type II, see `Anderson` and `ImageWindow`.

    The memory is the window of images and residuals, (m, B, ...) each, and the Gram matrix,
    (m, m, b). A graph cannot call a linear solver inside a loop, so the small system is solved by
    elimination. Its diagonal is scaled to 1 first: then no pivot exceeds 1, and elimination of a
    positive definite matrix needs no exchange of rows.

    Args:
        solver: the options.
        joint: whether the batch is one sample.
    """

    solver: Anderson
    joint: bool

    def start(self, z0: Leaves) -> Leaves:
        """Return an empty window: an unused slot is a row of the identity."""
        m, t = self.solver.m, z0[0]
        window = [_slots(t, m) for t in z0]
        b = 1 if self.joint or not t.dim() else t.shape[0]
        small = small_dtype(t.device)
        gram = torch.eye(m, dtype=small, device=t.device)[:, :, None].repeat(1, 1, b)
        return (*window, *(w.clone() for w in window), gram)

    def answer(self, z: Leaves, fz: Leaves) -> Leaves:
        """Return the image."""
        return fz

    def next(self, memory: Leaves, k: Tensor, z: Leaves, fz: Leaves) -> tuple[Leaves, Leaves]:
        """Insert an iterate into the window and mix."""
        m, n, gram = self.solver.m, len(z), memory[-1]
        slots = torch.arange(m, device=gram.device)
        new = slots == k % m
        g = [b.to(w.dtype) - a.to(w.dtype) for a, b, w in zip(z, fz, memory[:n], strict=True)]
        F = _insert(memory[:n], fz, new)
        G = _insert(memory[n : 2 * n], tuple(g), new)
        gram = self._with_row(gram, dots(G, tuple(g), self.joint, gram.dtype), new)
        alpha = self._weights(gram, slots <= k, new).to(F[0].dtype)  # (m, b)
        mixed = []
        for images, residuals, t in zip(F, G, z, strict=True):
            if self.solver.tau != 1:
                images = images + (self.solver.tau - 1) * residuals
            mixed.append((spread(alpha, t, self.joint, 1) * images).sum(0).to(t.dtype))
        return tuple(mixed), (*F, *G, gram)

    def _with_row(self, gram: Tensor, row: Tensor, new: Tensor) -> Tensor:
        """Return the Gram matrix with a new row and column, (m, b)."""
        lam, least = self.solver.lam, LEAST_LAM[gram.dtype]
        lam = lam if lam > least else least  # torch 2.15 cannot trace `max` inside a loop
        diagonal = row * (1 + lam) + (self.solver.ridge + TINY[gram.dtype])
        across, down = new[:, None, None], new[None, :, None]
        gram = torch.where(across, row[None], torch.where(down, row[:, None], gram))
        return torch.where(across & down, diagonal[None], gram)

    def _weights(self, gram: Tensor, used: Tensor, new: Tensor) -> Tensor:
        """Return the mixing weights, (m, b); a sample with NaN weights takes a plain step."""
        m = self.solver.m
        eye = torch.eye(m, dtype=gram.dtype, device=gram.device)[:, :, None]
        scale = (gram * eye).sum(1).rsqrt()  # (m, b) one over the root of the diagonal
        right = used[:, None] * scale
        system = torch.cat((gram * scale[:, None] * scale[None], right[:, None]), dim=1)
        for i in range(m):  # Gauss-Jordan: row i becomes the pivot row, the others lose column i
            pivot = system[i : i + 1] / system[i : i + 1, i : i + 1]
            system = system - (system[:, i : i + 1] - eye[:, i : i + 1]) * pivot
        w = system[:, m] * scale
        alpha = w / w.sum(0, keepdim=True)
        return torch.where(alpha == alpha, alpha, new[:, None].to(alpha.dtype))


def _slots(t: Tensor, m: int) -> Tensor:
    """Return `m` slots of zeros for a tensor, in single precision at least."""
    return t.new_zeros((m, *t.shape), dtype=norm_dtype(t.dtype))


def _insert(window: Leaves, leaves: Leaves, new: Tensor) -> Leaves:
    """Return a window whose new slot holds the tensors of a state."""
    return tuple(
        torch.where(new[(..., *(None,) * t.dim())], t.to(w.dtype)[None], w)
        for w, t in zip(window, leaves, strict=True)
    )
