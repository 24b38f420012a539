"""The blocks of the attractor: rotary attention, squared ReLU, gates."""

from __future__ import annotations

from math import log, sqrt
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deq_zoo.lm.joint import joint_linear
from torchdeq import VariationalDropout1d


class Surroundings(NamedTuple):
    """The inputs of a block besides the state, equal in all evaluations of f.

    Args:
        cos: (L, e) cosines of the rotary angles of the new tokens, each twice.
        sin: (L, e) sines, with the sign of the pair's first number reversed.
        k: (B, H, Lm, e) rotated keys of the tokens before.
        v: (B, H, Lm, e) their values.
        mask: (L, Lm + L) 0 where a query may look, else -inf; None if queries may look everywhere.
    """

    cos: Tensor
    sin: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None


class RMSNorm(nn.Module):
    r"""$x / \sqrt{\mathrm{mean}(x^2) + \epsilon} \cdot w$, with the mean in single precision.

    Args:
        width: features.
    """

    eps = 1e-5

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return _normalised(x, self.eps) * self.weight


def _normalised(x: Tensor, eps: float) -> Tensor:
    """Return a tensor divided by its root mean square over the last dimension."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    return F.rms_norm(wide, wide.shape[-1:], eps=eps).to(x.dtype)


def rotary_table(positions: Tensor, width: int, base: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and signed sines (L, width) of the angles of positions, for `rotate`.

    Angles are computed in double precision: in single precision those of far positions are coarse.
    """
    power = torch.arange(0, width, 2, device=positions.device, dtype=torch.float64) / width
    angle = torch.outer(positions.double(), base**-power)
    cos = angle.cos().repeat_interleave(2, dim=1)
    sin = torch.stack((-angle.sin(), angle.sin()), dim=2).flatten(1)
    return cos.to(like.dtype), sin.to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    r"""Return vectors (..., L, e) with each pair of neighbours (a, b) turned by its angle.

    $$(a, b) \to (a \cos - b \sin, \; b \cos + a \sin)$$
    """
    swapped: Tensor = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return x * cos + swapped * sin


class RotaryAttention(nn.Module):
    r"""Causal attention with rotary positions and keys and queries of one length.

    $$a_t = W_o \sum_{s \le t} \mathrm{softmax}_s\Big(\frac{q_t^\top k_s}{\sqrt e}\Big) v_s, \qquad
    q_t = R_t \, \nu(W_q x_t), \quad k_t = R_t \, \nu(W_k x_t)$$

    with rotations $R_t$ and $\nu(x) = x / \mathrm{rms}(x)$ for each head.

    Args:
        width: D.
        heads: H, of width e = D / H.

    Attributes:
        plain: compute the softmax step by step. The fused kernels have no second derivative, which
            a regularised Jacobian and gradients of higher order need, and no forward mode, which
            Newton's method needs.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.plain = heads, False
        self.c_q, self.c_k, self.c_v, self.c_proj = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, around: Surroundings) -> Tensor:
        """Return the output (B, L, D) for normalised states (B, L, D)."""
        return self.attend(x, around)[0]

    def attend(self, x: Tensor, around: Surroundings) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, and the keys and values that `keys` gives."""
        qkv = joint_linear(x, (self.c_q, self.c_k, self.c_v))
        qk, values = self._by_head(qkv, 3).tensor_split((2,))
        qk, own = self._unit(qk), values[0]
        q, k = rotate(qk, around.cos, around.sin)
        k = torch.cat((around.k, k), dim=2) if around.k.shape[2] else k
        v = torch.cat((around.v, own), dim=2) if around.v.shape[2] else own
        if self.plain:
            scores = q @ k.mT / sqrt(q.shape[-1])
            heads = (scores if around.mask is None else scores + around.mask).softmax(-1) @ v
        else:
            heads = F.scaled_dot_product_attention(q, k, v, attn_mask=around.mask)
        out: Tensor = self.c_proj(heads.transpose(1, 2).flatten(2))
        return out, qk[1], own

    def keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys before their rotation, and values, (B, H, L, e), of normalised states."""
        k, v = self._by_head(joint_linear(x, (self.c_k, self.c_v)), 2)
        return self._unit(k), v

    def _by_head(self, x: Tensor, kinds: int) -> Tensor:
        """Return (kinds, B, H, L, e) of features (B, L, kinds * D)."""
        by_head: Tensor = x.unflatten(2, (kinds, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return by_head

    def _unit(self, x: Tensor) -> Tensor:
        half = x.dtype in (torch.float16, torch.bfloat16)
        return _normalised(x, torch.finfo(torch.float32 if half else x.dtype).eps)


class SquaredReLU(nn.Module):
    r"""Two linear maps of every token, $W_2 \, \tfrac12 \max(W_1 x, 0)^2$."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, inner, bias=False)
        self.proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.proj(0.5 * self.fc(x).relu().square())
        return out


class PlainBlock(nn.Module):
    r"""A pre-norm block, $y = x + A(N_1 x)$ and then $y + M(N_2 y)$.

    Args:
        width: D.
        heads: H.
        inner: hidden features of the feed-forward net.
        dropout: probability of dropping a feature of a branch; fixed during a solve.
    """

    def __init__(self, width: int, heads: int, inner: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = RMSNorm(width), RMSNorm(width)
        self.attn, self.mlp = RotaryAttention(width, heads), SquaredReLU(width, inner)
        self.drop_1, self.drop_2 = VariationalDropout1d(dropout), VariationalDropout1d(dropout)

    def forward(self, x: Tensor, *around: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the state (B, L, D) after the block, and what `keys` gives for that before it.

        `around` has the fields of `Surroundings`.
        """
        gate_attn, gate_mlp = self.gates()
        seen = Surroundings(*around)  # type: ignore[arg-type]
        y, k, v = self.attn.attend(self.norm_1(x), seen)
        y = self.drop_1(y)
        x = x + (y if gate_attn is None else gate_attn * y)
        y = self.drop_2(self.mlp(self.norm_2(x)))
        return x + (y if gate_mlp is None else gate_mlp * y), k, v

    def gates(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the factors (D,) of the two branches; None for 1."""
        return None, None

    def keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys before their rotation, and values, (B, H, L, e), of the block's inputs."""
        return self.attn.keys(self.norm_1(x))


class GatedBlock(PlainBlock):
    r"""A block whose branches have learnt factors below $\gamma_{\max}$ for each feature.

    $$y = x + \gamma_a A(N_1 x), \qquad y + \gamma_m M(N_2 y), \qquad
    \gamma = \gamma_{\max} \, \sigma(r)$$

    Args:
        width: D.
        heads: H.
        inner: hidden features of the feed-forward net.
        dropout: probability of dropping a feature of a branch; fixed during a solve.
        gate_max: $\gamma_{\max}$.
        gate_start: $\gamma$ before training.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        inner: int,
        dropout: float = 0.0,
        gate_max: float = 0.75,
        gate_start: float = 0.25,
    ) -> None:
        super().__init__(width, heads, inner, dropout)
        self.gate_max = gate_max
        share = min(max(gate_start / gate_max, 1e-6), 1 - 1e-6)  # the limits are published
        start = log(share / (1 - share))
        self.raw_gamma_attn = nn.Parameter(torch.full((width,), start))
        self.raw_gamma_mlp = nn.Parameter(torch.full((width,), start))

    def gates(self) -> tuple[Tensor | None, Tensor | None]:
        return (
            self.gate_max * self.raw_gamma_attn.sigmoid(),
            self.gate_max * self.raw_gamma_mlp.sigmoid(),
        )
