"""Fields without equilibrium, the paper's baselines: SIREN, FFN, ReLU-PE and MFN."""

from __future__ import annotations

from itertools import pairwise
from math import ceil, log2, pi, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from deq_zoo.inr.layers import Injection
from deq_zoo.inr.model import Field, FieldConfig
from deq_zoo.output import Output

_OMEGA = 30.0  # SIREN's frequency between hidden layers


class Siren(Field):
    r"""SIREN: sines as activations of all layers (Sitzmann et al., 2020).

    $$h_1 = \sin(s A x + s a), \qquad h_{l+1} = \sin(30 \, (W_l h_l + b_l)), \qquad
    y = V h_L + \beta$$

    Args:
        d: coordinates of a point.
        o: numbers in a value.
        config: width C, hidden layers L and input scale s.
    """

    def __init__(self, d: int, o: int, config: FieldConfig) -> None:
        super().__init__(d, o, config.width)
        self.scale = config.input_scale
        sizes = [d, *[config.width] * config.layers, o]
        self.linear_maps = nn.ModuleList(nn.Linear(n, m) for n, m in pairwise(sizes))
        with torch.no_grad():
            for k, layer in enumerate(self.linear_maps):
                bound = 1 / d if k == 0 else sqrt(6 / config.width) / _OMEGA
                layer.weight.uniform_(-bound, bound)  # type: ignore[operator]

    def forward(
        self, x: Tensor, z0: Tensor | None = None, **call: Any
    ) -> Output[Tensor, Tensor | None]:
        self.refuse_solve(z0, call)
        first, *hidden, last = self.linear_maps
        # Half precision cannot represent phases of many turns.
        with torch.autocast(x.device.type, enabled=False):
            h = torch.sin(self.scale * first(self.points(x)))
        for layer in hidden:
            h = torch.sin(_OMEGA * layer(h))
        return Output([last(h).view(*x.shape[:-1], self.o)], None)


class EncodedMLP(Field):
    r"""A ReLU network on sines and cosines of the coordinates.

    $$\gamma(x) = (\sin 2 \pi B x, \cos 2 \pi B x), \qquad y = \mathrm{MLP}(\gamma(x))$$

    B is random in FFN (Tancik et al., 2020); in ReLU-PE (Mildenhall et al., 2020) it has powers of
    two along each axis.

    Args:
        d: coordinates of a point.
        o: numbers in a value.
        B: (m, d) frequencies, in cycles per unit.
        width: of the hidden layers.
        layers: hidden layers.
    """

    B: Tensor

    def __init__(self, d: int, o: int, B: Tensor, width: int, layers: int) -> None:
        super().__init__(d, o, width)
        self.register_buffer("B", B)
        maps: list[nn.Module] = []
        for k in range(layers):
            maps += [nn.Linear(2 * len(B) if k == 0 else width, width), nn.ReLU()]
        self.mlp = nn.Sequential(*maps, nn.Linear(width, o))

    def forward(
        self, x: Tensor, z0: Tensor | None = None, **call: Any
    ) -> Output[Tensor, Tensor | None]:
        self.refuse_solve(z0, call)
        with torch.autocast(x.device.type, enabled=False):
            phase = 2 * pi * self.points(x) @ self.B.mT
            code = torch.cat((phase.sin(), phase.cos()), dim=1)
        return Output([self.mlp(code).view(*x.shape[:-1], self.o)], None)


class MultiplicativeFilters(Field):
    r"""Products of filters and linear maps (Fathony et al., 2021).

    $$z_1 = g_0(x), \qquad z_{l+1} = (W_l z_l + b_l) \odot g_l(x), \qquad
    y = V z_{L+1} + \beta$$

    Args:
        d: coordinates of a point.
        o: numbers in a value.
        config: width, layers, and the filter fourier or gabor.
    """

    def __init__(self, d: int, o: int, config: FieldConfig) -> None:
        super().__init__(d, o, config.width)
        if config.filter == "siren_like":
            raise ValueError("an mfn has the filter fourier or gabor, got 'siren_like'")
        self.injection = Injection(
            d, config.width, config.layers, config.filter, config.input_scale, config.alpha
        )
        self.maps = nn.ModuleList(
            nn.Linear(config.width, config.width) for _ in range(config.layers)
        )
        self.output_map = nn.Linear(config.width, o)

    def forward(
        self, x: Tensor, z0: Tensor | None = None, **call: Any
    ) -> Output[Tensor, Tensor | None]:
        self.refuse_solve(z0, call)
        z, *filters = self.injection(self.points(x))
        for layer, g in zip(self.maps, filters, strict=True):
            z = layer(z) * g
        return Output([self.output_map(z).view(*x.shape[:-1], self.o)], None)


def make_baseline(d: int, o: int, config: FieldConfig) -> Field:
    """Return the baseline that a config describes, freshly initialised."""
    if config.kind == "siren":
        return Siren(d, o, config)
    if config.kind == "mfn":
        return MultiplicativeFilters(d, o, config)
    if config.kind == "ffn":
        B = config.input_scale * torch.randn(config.width // 2 or 1, d)
    else:
        octaves = 2.0 ** torch.arange(max(1, ceil(log2(config.input_scale)) + 1))
        B = torch.kron(torch.eye(d), octaves[:, None]) / 2
    return EncodedMLP(d, o, B, config.width, config.layers)
