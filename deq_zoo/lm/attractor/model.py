"""The attractor: an explicit transformer proposes hidden states, gated blocks refine them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from deq_zoo.lm.attention import causal_mask
from deq_zoo.lm.attractor.in_order import get_deq_in_order
from deq_zoo.lm.attractor.initial import fill_orthogonal, initialise_blocks, weight_size
from deq_zoo.lm.attractor.layers import (
    GatedBlock,
    PlainBlock,
    RMSNorm,
    Surroundings,
    rotary_table,
    rotate,
)
from deq_zoo.lm.attractor.published import PublishedSolve
from deq_zoo.lm.attractor.vocabulary import ClusteredVocabulary, TiedVocabulary
from deq_zoo.lm.config import LMConfig
from deq_zoo.lm.language_model import LanguageModel
from deq_zoo.lm.memory import LMOutput, Memory
from deq_zoo.model import WeightKind
from torchdeq import (
    DEQConfig,
    SolverStat,
    VariationalDropout1d,
    VariationalDropToken1d,
    mem_gc,
    reset_dropout,
)


class Attractor(LanguageModel):
    r"""A language model whose fixed point starts from an explicit transformer.

    $$c = \mathrm{backbone}(s E[x]), \qquad y^\star = c + R(y^\star + c), \qquad
    \log p(x_{t+1}) = \mathrm{softmax}(E \, N(y^\star_t))$$

    where $h + R(h)$ are the gated blocks, so $f(y) = \mathrm{blocks}(y + c) - y$. The state of a
    position depends on earlier positions only. The solve has one row for each position, with mixing
    weights of its own, which stops once it and all positions before it have converged: an
    unconverged state knows no later token, either. The gradient is that of one system
    (`coupled="adjoint"`).

    Shapes: ids `(B, L)`, states `(B, L, D)`.

    Args:
        config: the shape.
        deq: options of the DEQ: a `DEQConfig`, dict or Namespace.
    """

    def __init__(self, config: LMConfig, deq: Any = None) -> None:
        super().__init__(config)
        if config.design != "attractor":
            raise ValueError(f"an Attractor has the design attractor, got {config.design}")
        c, options = config, DEQConfig(deq)
        size = weight_size(c.width)
        scale = c.input_rms / size if c.input_rms else 1.0
        self.vocabulary: TiedVocabulary | ClusteredVocabulary
        if c.cutoffs or (c.embed and c.embed != c.width) or c.shrink > 1:
            self.vocabulary = ClusteredVocabulary(c, size, scale)
        else:
            self.vocabulary = TiedVocabulary(c.tokens, c.width, scale)
            fill_orthogonal(self.vocabulary.weight, size)
        shape = (c.width, c.heads, c.inner, c.dropout)
        self.prelude = nn.ModuleList(PlainBlock(*shape) for _ in range(c.backbone))
        self.core = nn.ModuleList(
            GatedBlock(*shape, c.gate_max, c.gate_start) for _ in range(c.blocks)
        )
        self.output_norm = RMSNorm(c.width)
        self.embedding_drop = VariationalDropout1d(c.dropout)
        self.output_drop = VariationalDropToken1d(c.dropout)
        initialise_blocks(self.blocks, c.width, c.core_start == "random")
        self.deq = get_deq_in_order(options)
        twice = options.jac_loss_weight or options.jac_incremental or options.higher_order
        forward_mode = getattr(self.deq.make_solver({}), "jacobian", None) == "exact"
        for block in self.blocks:
            block.attn.plain = bool(twice) or forward_mode
        self.published = PublishedSolve(c, options) if c.mixing == "published" else None

    @property
    def blocks(self) -> list[PlainBlock]:
        """Return all blocks, those of the backbone first."""
        return cast(list[PlainBlock], [*self.prelude, *self.core])

    def forward(
        self, ids: Tensor, z0: Tensor | None = None, *, memory: Memory | None = None, **call: Any
    ) -> LMOutput:
        """Return the hidden states of a segment, given the memory of the text before it.

        Args:
            ids: (B, L) tokens.
            z0: (B, L, D) states to start from; by default the output of the backbone.
            memory: of the segments before; None at the beginning of a text.
            **call: options of this call of the DEQ, e.g. `f_max_iter=24`.
        """
        if self.training:
            reset_dropout(self)
        x = self.embed(ids)
        around = self.surroundings(x, memory)
        c, kept = self.run_backbone(x, around)
        return self.solve(c, around[self.config.backbone :], kept, z0, **call)

    def embed(self, ids: Tensor) -> Tensor:
        """Return the vectors (B, L, D) of tokens (B, L)."""
        x: Tensor = self.embedding_drop(self.vocabulary(ids))
        return x

    def surroundings(self, x: Tensor, memory: Memory | None = None) -> list[Surroundings]:
        """Return everything besides the state that each block needs."""
        memory = self.empty_memory(x) if memory is None else memory
        past, length = memory.z.shape[1], x.shape[1]
        if memory.z.shape[0] != x.shape[0]:
            raise ValueError(
                f"the memory is of {len(memory.z)} streams, the tokens of {x.shape[0]}"
            )
        cos, sin = self.rotary(torch.arange(past + length, device=x.device), like=memory.z)
        mask = causal_mask(length, past, self.config.window, like=memory.z)
        kv = memory.z.unflatten(2, (len(self.blocks), 2, self.config.heads, -1))
        k, v = kv.permute(3, 2, 0, 4, 1, 5)  # (blocks, B, H, Lm, e) each
        k = rotate(k, cos[:past], sin[:past])
        now = cos[past:], sin[past:]
        return [Surroundings(*now, *kv, mask) for kv in zip(k, v, strict=True)]

    def rotary(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines of the angles of positions (L,)."""
        c = self.config
        return rotary_table(positions, c.width // c.heads, c.rotary_base, like)

    def run_backbone(self, x: Tensor, around: Sequence[Surroundings]) -> tuple[Tensor, Tensor]:
        """Return the output (B, L, D) of the backbone, and what a memory keeps of its blocks."""
        kept = []
        for block, each in zip(self.blocks[: self.config.backbone], around, strict=False):
            x, *own = self._run(block, x, each)
            kept.append(keys_and_values(*own))
        return x, torch.cat([x.new_empty(*x.shape[:2], 0), *kept], dim=2)

    def apply_core(self, h: Tensor, around: Sequence[Surroundings]) -> Tensor:
        """Return the output of the gated blocks."""
        for block, each in zip(self.core, around, strict=True):
            h = self._run(cast(PlainBlock, block), h, each)[0]
        return h

    def _run(
        self, block: PlainBlock, x: Tensor, around: Surroundings
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the state after a block, and the keys and values of that before it."""
        out: tuple[Tensor, Tensor, Tensor]
        if self.config.recompute and torch.is_grad_enabled():
            out = mem_gc(block, (x, *around))
        else:
            out = block(x, *around)
        return out

    def solve(
        self,
        c: Tensor,
        around: Sequence[Surroundings],
        kept: Tensor,
        z0: Tensor | None = None,
        *,
        explicit: bool = False,
        **call: Any,
    ) -> LMOutput:
        """Return the states in equilibrium with the output of the backbone.

        Args:
            c: (B, L, D) the output of the backbone.
            around: of the gated blocks.
            kept: what a memory keeps of the backbone.
            z0: (B, L, D) states to start from; `c` by default.
            explicit: return the states after one evaluation instead, with their whole gradient.
            **call: options of this call of the DEQ.
        """

        def f(y: Tensor) -> Tensor:
            return self.apply_core(y + c, around) - y

        z0 = c if z0 is None else z0
        if explicit:
            if call:
                raise TypeError(f"an explicit evaluation has no options of a solve, got {call}")
            states, stats = [f(z0)], SolverStat()
        elif self.published is not None:
            states, stats = self._solve_as_published(f, z0, **call)
        else:
            states, stats = self._solve_by_position(f, z0, **call)
        z = states[-1].detach()
        # Keys of the latest states, after an explicit evaluation, too: those of its input, which an
        # explicit network would keep, say less, and batches with a solve would find others.
        kept = torch.cat((kept, self.remember(z + c.detach(), around)), dim=2)
        u = c[:, :0]  # keys and values are all that a memory needs
        return LMOutput(predictions=states, state=z, stats=stats, u=u, kept=kept, f=f)

    def _solve_by_position(
        self, f: Callable[[Tensor], Tensor], z0: Tensor, sradius_mode: bool = False, **call: Any
    ) -> tuple[list[Tensor], SolverStat]:
        """Return the states and statistics of a solve with one row for each position."""
        length = z0.shape[1]  # not the whole shape: that would fix the batch of an exported program

        def f_rows(rows: Tensor) -> Tensor:
            return f(rows.unflatten(0, (-1, length))).flatten(0, 1)

        own = {**(call.pop("solver_kwargs", None) or {}), "length": length}
        rows, stats = self.deq(f_rows, z0.flatten(0, 1), solver_kwargs=own, **call)
        states = [z.unflatten(0, (-1, length)) for z in rows]
        if sradius_mode:  # positions are parts of one Jacobian: its radius is that of a sequence
            stats["sradius"] = self._radius(f, states[-1])
        return states, stats

    def _solve_as_published(
        self,
        f: Callable[[Tensor], Tensor],
        z0: Tensor,
        f_max_iter: int | None = None,
        sradius_mode: bool = False,
    ) -> tuple[list[Tensor], SolverStat]:
        """Return the state and statistics of the authors' solve."""
        assert self.published is not None
        z, stats = self.published(f, z0, self.training, f_max_iter)
        if sradius_mode:
            stats["sradius"] = self._radius(f, z)
        return [z], stats

    def _radius(self, f: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
        """Return (B,) the spectral radius of the Jacobian of each sequence."""
        _, stats = self.deq(f, z.detach(), sradius_mode=True, f_max_iter=1)
        radius: Tensor = stats["sradius"]
        return radius

    @torch.no_grad()
    def remember(self, h: Tensor, around: Sequence[Surroundings]) -> Tensor:
        """Return what a memory keeps of the gated blocks, from their input at solved states."""
        kept = []
        *first, last = cast(list[PlainBlock], [*self.core])
        for block, each in zip(first, around, strict=False):
            h, *own = block(h, *each)
            kept.append(keys_and_values(*own))
        kept.append(keys_and_values(*last.keys(h)))
        return torch.cat(kept, dim=2)

    def empty_memory(self, like: Tensor) -> Memory:
        c, dtype = self.config, self.output_norm.weight.dtype
        z = like.new_zeros(like.shape[0], 0, 2 * len(self.blocks) * c.width, dtype=dtype)
        return Memory(z, z.new_zeros(like.shape[0], 0, c.width))

    def weight_kind(self, name: str) -> WeightKind:
        core = name.startswith("core.")
        if super().weight_kind(name) == "matrix":
            return "core_matrix" if core else "matrix"
        return "core_vector" if core else "vector"

    def nll(self, z: Tensor, target: Tensor) -> Tensor:
        return self.vocabulary.nll(self.output_drop(self.output_norm(z)), target)

    def log_prob(self, z: Tensor) -> Tensor:
        return self.vocabulary.log_prob(self.output_drop(self.output_norm(z)))


def keys_and_values(k: Tensor, v: Tensor) -> Tensor:
    """Return keys and values (B, H, L, e) as a memory keeps them, (B, L, 2D), without a graph."""
    return torch.stack((k.detach(), v.detach()), dim=3).permute(0, 2, 3, 1, 4).flatten(2)
