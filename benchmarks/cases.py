"""The fixed-point problems: seeded, float32, torch only.

Gains are set so that every map contracts near its solution, about equally fast: plain iteration
needs 60 to 90 evaluations to a relative residual of 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn.functional import conv2d, gelu, group_norm, layer_norm, pad, relu

State = Any  # a tensor or a tuple of them
NORM = 0.95  # of the weight matrices
INPUT = 0.3  # size of the injected inputs: small enough that tanh does not do the contracting


class Case(NamedTuple):
    """A map, its start and its weights; a tuple state is unpacked, `f(*z)`."""

    f: Callable[..., State]
    z0: State
    weights: tuple[Tensor, ...]
    x: Tensor | None = None  # the injected input, of maps that other libraries get, too


def mlp(batch: int, width: int) -> Case:
    r"""Return one layer, $f(z) = \tanh(W z + x)$."""
    rng = Generator().manual_seed(0)
    W = symmetric(width, rng)
    x = INPUT * torch.randn(batch, width, generator=rng)
    return Case(lambda z: torch.tanh(torch.addmm(x, z, W)), torch.zeros_like(x), (W,), x)


def conv(batch: int, channels: int, size: int) -> Case:
    r"""Return a residual block, $f(z) = (n(x + K_2\, (n(K_1 z))_+))_+$, with n the GroupNorm."""
    rng = Generator().manual_seed(0)
    K1 = kernel(channels, rng)
    K2 = 1.36 * kernel(channels, rng)
    x = torch.randn(batch, channels, size, size, generator=rng)

    def f(z: Tensor) -> Tensor:
        h = relu(group_norm(conv2d(z, K1, padding=1), 8))
        return relu(group_norm(x + conv2d(h, K2, padding=1), 8))

    return Case(f, torch.zeros_like(x), (K1, K2))


def attention(batch: int, length: int, width: int, heads: int) -> Case:
    """Return a causal transformer cell with post-norm, its input injected before both norms.

    Attention is written out, because the fused kernel has no forward-mode derivative.
    """
    rng = Generator().manual_seed(0)
    qkv = linear(width, 3 * width, rng)
    out = 1.9 * linear(width, width, rng)
    up = linear(width, 4 * width, rng)
    down = 1.9 * linear(4 * width, width, rng)
    x = torch.randn(batch, length, width, generator=rng)
    mask = torch.full((length, length), -torch.inf).triu(1)
    scale = (width // heads) ** -0.5

    def f(z: Tensor) -> Tensor:
        split = (z @ qkv).view(batch, length, 3, heads, width // heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)  # (B, heads, T, width / heads) each
        mixed = (torch.softmax(q @ k.mT * scale + mask, dim=-1) @ v).transpose(1, 2)
        h = layer_norm(x + z + mixed.reshape(batch, length, width) @ out, (width,))
        return layer_norm(x + h + gelu(h @ up) @ down, (width,))

    return Case(f, torch.zeros_like(x), (qkv, out, up, down))


def chain(length: int, width: int) -> Case:
    r"""Return a trajectory as one sample, $f(z)_t = \tanh(W z_{t-1} + x_t)$."""
    rng = Generator().manual_seed(0)
    W = symmetric(width, rng)
    x = INPUT * torch.randn(1, length, width, generator=rng)
    z0 = torch.zeros_like(x)
    return Case(lambda z: torch.tanh(pad(z[:, :-1], (0, 0, 1, 0)) @ W + x), z0, (W,))


def pair(batch: int, width: int, channels: int, size: int) -> Case:
    """Return a vector and a map that drive each other: by the mean of the map, and as a bias."""
    rng = Generator().manual_seed(0)
    W = 0.8 / NORM * symmetric(width, rng)
    K = 0.4 * kernel(channels, rng)
    to_map = 0.8 * linear(width, channels, rng)
    to_vector = 0.8 * linear(channels, width, rng)
    x = INPUT * torch.randn(batch, width, generator=rng)
    y = INPUT * torch.randn(batch, channels, size, size, generator=rng)

    def f(v: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        bias = (v @ to_map)[:, :, None, None]
        return (
            torch.tanh(v @ W + m.mean((2, 3)) @ to_vector + x),
            torch.tanh(conv2d(m, K, padding=1) + bias + y),
        )

    return Case(f, (torch.zeros_like(x), torch.zeros_like(y)), (W, K, to_map, to_vector))


def cell(batch: int, width: int, hidden: int) -> Case:
    r"""Return a two-layer perceptron with a norm, $f(z) = n(x + D\, \mathrm{gelu}(U z))$."""
    rng = Generator().manual_seed(0)
    U = linear(width, hidden, rng)
    D = 1.9 * linear(hidden, width, rng)
    x = torch.randn(batch, width, generator=rng)

    def f(z: Tensor) -> Tensor:
        return layer_norm(x + gelu(z @ U) @ D, (width,))

    return Case(f, torch.zeros_like(x), (U, D), x)


def symmetric(width: int, rng: Generator) -> Tensor:
    """Return a random symmetric matrix of norm `NORM`, which is its spectral radius, too."""
    A = torch.randn(width, width, generator=rng)
    W: Tensor = A + A.mT
    v = torch.randn(width, generator=rng)
    for _ in range(100):  # power iteration; a dense decomposition takes a minute at width 4096
        v = W @ (v / v.norm())
    return W.mul_(NORM / float(v.norm()))


def linear(n_in: int, n_out: int, rng: Generator) -> Tensor:
    return torch.randn(n_in, n_out, generator=rng).mul_(n_in**-0.5)


def kernel(channels: int, rng: Generator) -> Tensor:
    return torch.randn(channels, channels, 3, 3, generator=rng).mul_((9 * channels) ** -0.5)


CASES: dict[str, Callable[[], Case]] = {
    "mlp": lambda: mlp(32, 64),
    "mlp-wide": lambda: mlp(32, 4096),
    "conv": lambda: conv(8, 32, 16),
    "attention": lambda: attention(4, 64, 128, heads=4),
    "chain": lambda: chain(1000, 64),
    "pair": lambda: pair(16, 64, 16, 8),
    "conv-large": lambda: conv(8, 64, 64),
    "cell": lambda: cell(512, 512, 2048),
}
LARGE = "conv-large"  # for memory only
SOLVED = [name for name in CASES if name not in (LARGE, "cell")]  # by every solver


def apply(f: Callable[..., State], z: State) -> State:
    """Return one image of `f`."""
    return f(*z) if isinstance(z, tuple) else f(z)


def rows(z: State) -> Tensor:
    """Return the state as a (B, D) matrix."""
    return torch.cat([t.flatten(1) for t in (z if isinstance(z, tuple) else (z,))], dim=1)


def residual(case: Case, z: State) -> float:
    """Return the worst relative residual of a batch, computed without any solver."""
    fz = rows(apply(case.f, z))
    gap = torch.linalg.vector_norm(fz - rows(z), dim=1)
    return float((gap / torch.linalg.vector_norm(fz, dim=1)).max())
