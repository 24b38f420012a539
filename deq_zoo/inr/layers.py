"""The parts of an equilibrium field: the injection of coordinates, and the map f.

Attribute names are those of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import pi
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deq_zoo.plain_layers import require_weights

Filter = Literal["siren_like", "fourier", "gabor"]
FILTERS = ("siren_like", "fourier", "gabor")


class Injection(nn.Module):
    r"""Filters of the coordinates, one for each layer of f and one before them.

    $$a = A x + c, \qquad u = a \quad\text{(siren\_like)}, \qquad u = \sin a
    \quad\text{(fourier)}, \qquad
    u = \sin a \; e^{-\frac12 \gamma \|x - \mu\|^2} \quad\text{(gabor)}$$

    Shapes: `x` is `(N, d)`; the result is `layers + 1` tensors `(N, width)`.

    Args:
        d: coordinates of a point.
        width: of each filter.
        layers: of f.
        filter: which of the three.
        input_scale: spread of the frequencies A, shared by all filters.
        alpha: shape of the Gamma distribution from which gabor draws its $\gamma$.
    """

    def __init__(
        self, d: int, width: int, layers: int, filter: Filter, input_scale: float, alpha: float
    ) -> None:
        super().__init__()
        self.filter, self.parts = filter, layers + 1
        rows = self.parts * width
        self.x_map = nn.Linear(d, rows)
        scale = torch.full((rows, 1), input_scale / self.parts**0.5)
        if filter == "gabor":
            self.mu = nn.Parameter(2 * torch.rand(rows, d) - 1)
            shape = torch.full((rows,), alpha)
            self.gamma = nn.Parameter(torch.distributions.Gamma(shape, 1.0).sample())
            scale = scale * self.gamma.detach()[:, None].sqrt()
        with torch.no_grad():
            self.x_map.weight.mul_(scale)  # PyTorch has drawn it from U(±1/sqrt(d))
            nn.init.uniform_(self.x_map.bias, -pi, pi)

    def forward(self, x: Tensor) -> list[Tensor]:
        require_weights(x_map=self.x_map)
        # Half precision cannot represent the products of coordinates and high frequencies.
        with torch.autocast(x.device.type, enabled=False):
            return [self._part(x, k) for k in range(self.parts)]

    def _part(self, x: Tensor, k: int) -> Tensor:
        """Return filter `k`, computed apart from the others: a slice costs a copy in backward."""

        def cut(t: Tensor) -> Tensor:
            return t.chunk(self.parts)[k]

        a = F.linear(x, cut(self.x_map.weight), cut(self.x_map.bias))
        if self.filter == "siren_like":
            return a
        if self.filter == "fourier":
            return a.sin()
        # Differences, not the expanded square, which rounding can make negative.
        axes = zip(x.unbind(1), cut(self.mu).unbind(1), strict=True)
        square = sum((x_i[:, None] - mu_i).square() for x_i, mu_i in axes)
        gamma = cut(self.gamma).clamp_min(0)  # a negative one would make the envelope grow
        return a.sin() * torch.exp(-0.5 * gamma * square)


class FilteredMap(nn.Module):
    r"""The map f: layers that mix the state, each with its filter.

    $$\begin{aligned}
    \text{siren\_like:}\quad & v_0 = z + \sin u_0, \quad v_l = \sin(W_l v_{l-1} + b_l + u_l) \\
    \text{fourier, gabor:}\quad & v_0 = z + u_0, \quad v_l = (W_l v_{l-1} + b_l) \odot u_l
    \end{aligned}$$

    and $f(z) = v_L$.

    Args:
        width: of the state.
        layers: L.
        filter: of the injection.
    """

    def __init__(self, width: int, layers: int, filter: Filter) -> None:
        super().__init__()
        self.filter = filter
        self.layers = nn.ModuleList(
            nn.ModuleDict({"z_map": nn.Linear(width, width)}) for _ in range(layers)
        )

    def at(self, u: Sequence[Tensor], solving: bool = True) -> PointMap:
        """Return the map z -> f(z) of some points.

        The first filter does not depend on z. A solve computes $k = W_1 g_0 + b_1 + u_1$ once, and
        an iteration is `sin(W z + k)`. The few steps of a warm start add the filter to z instead,
        which saves one product with W, and two in the backward pass.

        Args:
            u: the injection of the points.
            solving: whether the caller evaluates f many times.
        """
        maps = [layer["z_map"] for layer in self.layers]  # type: ignore[index]
        require_weights(z_map=maps[0])
        first, W = maps[0], maps[0].weight.mT
        if self.filter == "siren_like":
            g, c = u[0].sin(), first.bias + u[1]
        else:
            g, c = u[0], first.bias
        k = _affine(c, g, W) if solving else c

        def f(z: Tensor, k: Tensor, *u: Tensor) -> Tensor:
            v = self._filtered(_affine(k, z if solving else z + g, W), u[1], added=True)
            for map_l, u_l in zip(maps[1:], u[2:], strict=True):
                v = self._filtered(map_l(v), u_l)
            return v

        return PointMap(f, (k, *u))

    def _filtered(self, mixed: Tensor, u: Tensor, added: bool = False) -> Tensor:
        """Return the output of a layer; `added`: `mixed` contains the filter of siren_like."""
        if self.filter != "siren_like":
            return mixed * u if torch.is_grad_enabled() else mixed.mul_(u)
        mixed = mixed if added else mixed + u
        return (
            mixed.sin() if torch.is_grad_enabled() else mixed.sin_()
        )  # in place: a solve needs no graph

    def forward(self, z: Tensor, *u: Tensor) -> Tensor:
        """Return f(z) for an injection."""
        return self.at(u, solving=False)(z)


class PointMap:
    """The map of some points, `f(z)`, and `f(z, *rows)` for others that have these rows.

    Args:
        f: called with a state and rows.
        rows: what belongs to the points, one row for each.
    """

    def __init__(self, f: Callable[..., Tensor], rows: tuple[Tensor, ...]) -> None:
        self._f, self.rows = f, rows

    def __call__(self, z: Tensor, *rows: Tensor) -> Tensor:
        return self._f(z, *(rows or self.rows))


def _affine(c: Tensor, z: Tensor, W: Tensor) -> Tensor:
    """Return `c + z W`, under autocast in the precision of c, whose phases have many turns."""
    if torch.is_autocast_enabled(z.device.type):
        return z @ W + c
    return torch.addmm(c, z, W)
