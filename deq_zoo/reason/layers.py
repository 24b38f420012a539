"""Layers of the reasoners: blocks whose norm follows the residual sum."""

from __future__ import annotations

from math import erf, exp, isqrt, pi, sqrt
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deq_zoo.reason.config import ReasonConfig

_EPS = 1e-5
_THETA = 10_000.0
# The standard deviation of a normal that is cut off at two standard deviations.
_CUT = sqrt(1 - 4 * exp(-2) / sqrt(2 * pi) / erf(sqrt(2)))


@torch.no_grad()
def truncated_normal(t: Tensor, std: float, generator: torch.Generator | None = None) -> Tensor:
    """Fill a tensor from a normal cut off at two standard deviations; return the tensor.

    `std` is the standard deviation of the samples, where `torch.nn.init.trunc_normal_` takes that
    of the normal before the cut.
    """
    if not std:
        return t.zero_()
    edge = erf(sqrt(2))
    return from_uniform(t.uniform_(-edge, edge, generator=generator), std)


def from_uniform(u: Tensor, std: float) -> Tensor:
    """Turn uniform numbers between the values of erf at the cuts into normal ones, in place."""
    scale = std / _CUT
    return u.erfinv_().mul_(sqrt(2) * scale).clamp_(-2 * scale, 2 * scale)


def rms(h: Tensor) -> Tensor:
    """Return h divided by its root mean square over the last axis, in float32 or better."""
    wide = h if h.dtype == torch.float64 else h.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPS)).to(h.dtype)


def inner_width(size: int, expansion: float, multiple: int = 256) -> int:
    """Return the inner width of an MLP: 2/3 of the expanded size, up to a multiple."""
    return -(-round(expansion * size * 2 / 3) // multiple) * multiple


class Linear(nn.Module):
    """A linear map without bias, drawn with standard deviation 1 / sqrt(inputs)."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(truncated_normal(torch.empty(outputs, inputs), inputs**-0.5))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """Rows of numbers, drawn with standard deviation 1 / sqrt(width)."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.embedding_weight = nn.Parameter(
            truncated_normal(torch.empty(rows, width), width**-0.5)
        )


class SwiGLU(nn.Module):
    r"""An MLP over the last axis: $D\,(\mathrm{silu}(g) \cdot v)$ with $(g, v) = G x$."""

    def __init__(self, size: int, expansion: float, multiple: int) -> None:
        super().__init__()
        inner = inner_width(size, expansion, multiple)
        self.gate_up_proj = Linear(size, 2 * inner)
        self.down_proj = Linear(inner, size)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.gate_up_proj(x).chunk(2, dim=-1)
        out: Tensor = self.down_proj(F.silu(gate) * value)
        return out


class Attention(nn.Module):
    """Attention of all positions to all others, padding included."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv_proj = Linear(width, 3 * width)
        self.o_proj = Linear(width, width)

    def forward(self, h: Tensor, tables: Tables | None) -> Tensor:
        b, n, _ = h.shape
        qkv = self.qkv_proj(h).view(b, n, 3 * self.heads, -1)
        q, k, v = qkv.transpose(1, 2).chunk(3, dim=1)  # (B, heads, N, width of a head)
        if tables is not None:
            q, k = rotate(q, tables), rotate(k, tables)
        out: Tensor = self.o_proj(
            F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, -1)
        )
        return out


class Convolution(nn.Module):
    """A 3x3 convolution over a square board: each cell sees itself and the eight around it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        shape, std = (width, width, 3, 3), (9 * width) ** -0.5
        self.weight = nn.Parameter(truncated_normal(torch.empty(shape), std))

    def forward(self, h: Tensor) -> Tensor:
        side = isqrt(h.shape[1])
        board = h.unflatten(1, (side, side)).permute(0, 3, 1, 2)  # channels last: no copy
        return F.conv2d(board, self.weight, padding=1).permute(0, 2, 3, 1).flatten(1, 2)


def rotation_angles(positions: int, size: int) -> Tensor:
    """Return the angles (positions, size) by which the entries of a head turn, in float64."""
    frequencies = _THETA ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    return torch.outer(torch.arange(positions, dtype=torch.float64), frequencies).repeat(1, 2)


def board_angles(height: int, width: int, size: int) -> Tensor:
    """Return the angles of cells, row by row: half of a head turns by row, half by column."""
    rows = rotation_angles(height, size // 2).repeat_interleave(width, dim=0)
    columns = rotation_angles(width, size // 2).repeat(height, 1)
    return torch.cat((rows, columns), dim=1)


class Tables(NamedTuple):
    """Cosines and sines (N, size) of the angles of all positions, and groups of pairs in a head."""

    cos: Tensor
    sin: Tensor
    groups: int


class Rotation:
    """Rotary positions: the tables in the dtype and on the device of a state.

    Args:
        angles: (N, size) in float64, so that no precision of the model loses digits of it.
        groups: parts of a head that turn by themselves: 1, or 2 on a board.
    """

    def __init__(self, angles: Tensor, groups: int = 1) -> None:
        self.angles, self.groups = angles, groups
        self._tables: dict[tuple[torch.device, torch.dtype], Tables] = {}

    def tables(self, like: Tensor) -> Tables:
        """Return the tables for a state; of float32 for states of lower precision."""
        key = (like.device, like.dtype if like.dtype == torch.float64 else torch.float32)
        if key not in self._tables:
            with torch.inference_mode(False):  # a later backward pass must be able to save them
                cos, sin = self.angles.cos().to(*key), self.angles.sin().to(*key)
                self._tables[key] = Tables(cos, sin, self.groups)
        return self._tables[key]


def rotate(v: Tensor, tables: Tables) -> Tensor:
    """Return vectors (..., N, size) rotated in pairs: entry j with the entry half a group on."""
    wide = v.to(tables.cos.dtype)
    first, second = wide.unflatten(-1, (tables.groups, 2, -1)).unbind(-2)
    turned = torch.stack((-second, first), dim=-2).flatten(-3)
    return (wide * tables.cos + turned * tables.sin).to(v.dtype)


class Block(nn.Module):
    """A block of a network: mix positions, then an MLP, each followed by a norm."""

    def __init__(self, net: ReasonConfig) -> None:
        super().__init__()
        self.mixer = net.mixer
        if net.mixer == "mlp":
            self.mlp_t = SwiGLU(net.positions, net.expansion, net.multiple)
        elif net.mixer == "conv":
            self.conv = Convolution(net.width)
        else:
            self.self_attn = Attention(net.width, net.heads)
        self.mlp = SwiGLU(net.width, net.expansion, net.multiple)

    def mix(self, h: Tensor, tables: Tables | None) -> Tensor:
        """Return h after positions have seen each other, normalised.

        The MLP runs over positions, so its norm does, too: that of each channel.
        """
        if self.mixer == "mlp":
            g = h.mT
            return rms(g + self.mlp_t(g)).mT
        if self.mixer == "conv":
            return rms(h + self.conv(h))
        return rms(h + self.self_attn(h, tables))

    def forward(self, h: Tensor, tables: Tables | None) -> Tensor:
        h = self.mix(h, tables)
        return rms(h + self.mlp(h))


class Network(nn.Module):
    """Blocks in a row, applied to the sum of a state and its injection: F(h, inject)."""

    def __init__(self, net: ReasonConfig, blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(net) for _ in range(blocks))

    def forward(self, h: Tensor, inject: Tensor, tables: Tables | None) -> Tensor:
        u = h + inject
        for block in self.layers:
            u = block(u, tables)
        return u


def make_rotation(net: ReasonConfig) -> Rotation | None:
    """Return the rotation of all positions, slots included; None if nothing is rotated."""
    size = net.width // net.heads
    if net.position == "rope":
        return Rotation(rotation_angles(net.positions, size))
    if net.position == "rope2d":
        side = isqrt(net.cells)
        return Rotation(board_angles(side, side, size), groups=2)
    return None
