"""The authors' models, written again from their equations: tensors in their layout, one f, softmax.

Shapes are those of the paper's appendix: D = width, E = embed, I = inner, K clusters after the
first. Queries, keys and values come head by head in `deq-lm` (redesigned), kind by kind in
`deq-seq` (original), which has convolutions of width 1 for linear maps.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import sqrt

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from deq_zoo.lm import LMConfig

State = dict[str, Tensor]


def draw_state(config: LMConfig, norm: str) -> State:
    """Draw random weights in the authors' layout."""
    rng = torch.Generator().manual_seed(0)
    width = config.width

    def draw(*shape: int) -> Tensor:
        return 0.4 * torch.randn(*shape, generator=rng, dtype=torch.float64)

    state = _draw_vocabulary(config, draw)
    original = config.design == "original"
    convolution = (1,) if original else ()
    injection = "inject_conv" if original else "injection"
    state[f"{injection}.weight"] = draw(3 * width, width, *convolution)
    state[f"{injection}.bias"] = draw(3 * width)
    frequency = torch.arange(0, width, 2, dtype=torch.float32) / width
    state["pos_emb.inv_freq"] = (10000**-frequency).double()
    for block in range(config.blocks):
        at = "" if original else f".{block}"
        attention, feed_forward = f"func.dec_attn{at}", f"func.pos_ff{at}"
        for name, rows in (("qkv_net", 3 * width), ("r_net", width), ("o_net", width)):
            state |= _draw_weight(f"{attention}.{name}", draw(rows, width, *convolution), norm)
        state[f"{attention}.o_net.bias"] = draw(width)
        for bias in ("r_w_bias", "r_r_bias"):
            state[f"{attention}.{bias}"] = draw(config.heads, width // config.heads)
        state |= _draw_weight(f"{feed_forward}.ff1_net", draw(config.inner, width), norm)
        state |= _draw_weight(f"{feed_forward}.ff2_net", draw(width, config.inner), norm)
        state[f"{feed_forward}.ff1_net.bias"] = draw(config.inner)
        state[f"{feed_forward}.ff2_net.bias"] = draw(width)
        if not original:
            for layer in (f"{attention}.ln1", f"{attention}.ln2", f"{feed_forward}.ln"):
                state[f"{layer}.weight"], state[f"{layer}.bias"] = draw(width), draw(width)
    return state


def _draw_vocabulary(config: LMConfig, draw: Callable[..., Tensor]) -> State:
    ends, embed = [0, *config.cutoffs, config.tokens], config.embed or config.width
    clusters = len(config.cutoffs)
    sizes, widths = [config.tokens], [embed]
    if config.shrink > 1:
        sizes = [b - a for a, b in pairwise(ends)]
        widths = [embed // config.shrink**i for i in range(clusters + 1)]
    state: State = {}
    for i, (size, columns) in enumerate(zip(sizes, widths, strict=True)):
        state[f"word_emb.emb_layers.{i}.weight"] = draw(size, columns)
        state[f"crit.out_layers.{i}.weight"] = state[f"word_emb.emb_layers.{i}.weight"]
        state[f"crit.out_layers.{i}.bias"] = draw(size)
        if config.shrink > 1 or embed != config.width:
            state[f"word_emb.emb_projs.{i}.weight"] = draw(config.width, columns)
    if config.shrink > 1 or embed != config.width:
        state["crit.out_projs.0.weight"] = draw(config.width, embed)
        for i in range(1, clusters + 1):
            twin = 0 if config.shrink == 1 else i
            state[f"crit.out_projs.{i}.weight"] = state[f"word_emb.emb_projs.{twin}.weight"]
    if clusters:
        state["crit.cluster_weight"] = draw(clusters, embed)
        state["crit.cluster_bias"] = draw(clusters)
    return state


def _draw_weight(name: str, weight: Tensor, norm: str) -> State:
    """Return a weight under a norm: its direction and sizes, or singular vectors and scales."""
    if norm == "none":
        return {f"{name}.weight": weight}
    size = torch.linspace(0.4, 1.0, len(weight), dtype=torch.float64)
    g = size.view(-1, *[1] * (weight.dim() - 1))
    if norm == "weight_norm":
        return {f"{name}.weight_v": weight, f"{name}.weight_g": g}
    u, _, v = torch.linalg.svd(weight.flatten(1))
    return {
        f"{name}.weight_orig": weight,
        f"{name}.weight_g": g,
        f"{name}.weight_u": u[:, 0].contiguous(),
        f"{name}.weight_v": v[0].contiguous(),
    }


class AuthorsModel:
    """Embedding, f without memory, and softmax, computed from weights in the authors' layout."""

    def __init__(self, config: LMConfig, state: State) -> None:
        self.config, self.state = config, state
        self.original = config.design == "original"
        self.ends = [0, *config.cutoffs, config.tokens]

    def weight(self, name: str) -> Tensor:
        """Return a matrix with its norm applied."""
        parts = {k.rpartition("weight")[2]: v for k, v in self.state.items()
                 if k.startswith(f"{name}.weight")}  # fmt: skip
        if "" in parts:
            return parts[""].flatten(1)
        g = parts["_g"].flatten(1)
        if "_orig" in parts:
            matrix = parts["_orig"].flatten(1)
            return matrix * g / (parts["_u"] @ matrix @ parts["_v"])
        matrix = parts["_v"].flatten(1)
        return matrix * (g / matrix.norm(dim=1, keepdim=True))

    def embed(self, ids: Tensor) -> Tensor:
        """Return the vectors (B, L, D) of tokens, one by one."""
        rows = []
        for token in ids.flatten().tolist():
            i = 0
            if self.config.shrink > 1:
                i = max(k for k, end in enumerate(self.ends[:-1]) if token >= end)
                token -= self.ends[i]
            row = self.state[f"word_emb.emb_layers.{i}.weight"][token]
            projection = self.state.get(f"word_emb.emb_projs.{i}.weight")
            rows.append(row if projection is None else projection @ row)
        e = torch.stack(rows).view(*ids.shape, self.config.width)
        return sqrt(self.config.width) * e

    def apply_f(self, z: Tensor, ids: Tensor) -> Tensor:
        """Return f(z), (B, L, D), for tokens without memory."""
        name = "inject_conv" if self.original else "injection"
        u = self.embed(ids) @ self.weight(name).mT + self.state[f"{name}.bias"]
        for block in range(self.config.blocks):
            at = "" if self.original else f".{block}"
            z = self._block(z, u, f"func.dec_attn{at}", f"func.pos_ff{at}")
        return z

    def _block(self, z: Tensor, u: Tensor, attention: str, feed_forward: str) -> Tensor:
        post = self.original and not self.config.pre_norm
        x = z if post else self._norm(z, f"{attention}.ln1")
        heads = self._attend(x, u, attention)
        if not self.original:
            heads = self._norm(heads, f"{attention}.ln2")
        y = z + heads @ self.weight(f"{attention}.o_net").mT + self.state[f"{attention}.o_net.bias"]
        y = self._norm(y, "") if post else y
        x = y if post else self._norm(y, f"{feed_forward}.ln")
        hidden = x @ self.weight(f"{feed_forward}.ff1_net").mT
        hidden = (hidden + self.state[f"{feed_forward}.ff1_net.bias"]).relu()
        out = hidden @ self.weight(f"{feed_forward}.ff2_net").mT
        out = y + out + self.state[f"{feed_forward}.ff2_net.bias"]
        return self._norm(out, "") if post else out

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = (self.state.get(f"{name}.{part}") for part in ("weight", "bias"))
        return layer_norm(x, x.shape[-1:], weight, bias)

    def _attend(self, x: Tensor, u: Tensor, name: str) -> Tensor:
        heads, width = self.config.heads, self.config.width
        length, d = x.shape[1], width // heads
        rows = x @ self.weight(f"{name}.qkv_net").mT + u
        if self.original:
            q, k, v = rows.unflatten(2, (3, heads, d)).unbind(2)
        else:
            q, k, v = rows.unflatten(2, (heads, 3, d)).unbind(3)
        power = torch.arange(0, width, 2, dtype=torch.float64) / width
        out = torch.zeros_like(q)
        for i in range(length):
            distance = torch.arange(i, -1, -1, dtype=torch.float64)[:, None] * 10000**-power
            table = torch.cat((distance.sin(), distance.cos()), dim=1)
            r = (table @ self.weight(f"{name}.r_net").mT).unflatten(1, (heads, d))
            content = torch.einsum("bhd,bjhd->bhj", q[:, i] + self.state[f"{name}.r_w_bias"],
                                   k[:, : i + 1])  # fmt: skip
            offset = torch.einsum("bhd,jhd->bhj", q[:, i] + self.state[f"{name}.r_r_bias"], r)
            weights = ((content + offset) / sqrt(d)).softmax(-1)
            out[:, i] = torch.einsum("bhj,bjhd->bhd", weights, v[:, : i + 1])
        return out.flatten(2)

    def log_prob(self, h: Tensor) -> Tensor:
        """Return the log-probabilities (B, L, V) of all tokens."""
        clusters = len(self.config.cutoffs)
        parts = []
        head = self._logits(h, 0)
        if clusters:
            extra = self._project(h, 0) @ self.state["crit.cluster_weight"].mT
            head = torch.cat((head, extra + self.state["crit.cluster_bias"]), dim=-1)
        head = head.log_softmax(-1)
        parts.append(head[..., : self.ends[1]])
        for i in range(1, clusters + 1):  # the first cluster has the last row
            parts.append(head[..., -i, None] + self._logits(h, i).log_softmax(-1))
        return torch.cat(parts, dim=-1)

    def _project(self, h: Tensor, i: int) -> Tensor:
        projection = self.state.get(f"crit.out_projs.{i}.weight")
        return h if projection is None else h @ projection

    def _logits(self, h: Tensor, i: int) -> Tensor:
        layer = 0 if self.config.shrink == 1 else i
        table, bias = (self.state[f"crit.out_layers.{layer}.{p}"] for p in ("weight", "bias"))
        if self.config.shrink == 1:
            own = slice(self.ends[i], self.ends[i + 1])
            table, bias = table[own], bias[own]
        return self._project(h, i) @ table.mT + bias
