"""The DEQ transformer, a language model whose hidden states are equilibria."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from deq_zoo.checks import check_fields
from deq_zoo.lm.adaptive import AdaptiveVocabulary
from deq_zoo.lm.attention import Context, causal_mask, sinusoids
from deq_zoo.lm.layers import LeakyStack, PostNormBlock, PreNormBlock, Stack
from deq_zoo.lm.tokens import Lexicon
from torchdeq import (
    DEQConfig,
    SolverStat,
    VariationalDropout1d,
    VariationalDropToken1d,
    apply_norm,
    get_deq,
    reset_dropout,
    reset_norm,
)


@dataclass(frozen=True, kw_only=True)
class LMConfig:
    """The shape of a DEQ transformer.

    Args:
        design: the map f: original (one post-norm block), redesigned (pre-norm blocks, which have
            no fixed point) or convergent (the same with a leak, which have one; read through a
            norm).
        tokens: size of the vocabulary V.
        width: features of the state D.
        heads: of attention.
        inner: hidden features of each feed-forward net.
        blocks: in one evaluation of f.
        embed: width of the first cluster's vectors E; 0 is `width`.
        cutoffs: ids at which further clusters of the vocabulary begin.
        shrink: how many times narrower each cluster is than the one before.
        dropout: of features, the same ones for all tokens and evaluations of f.
        attention_dropout: of attention weights.
        position_dropout: whether dropout takes features of all distances, or whole distances.
        window: how far attention looks back; 0 is as far as there is something.
        init: of f's matrices: normal (0.01), uniform by fan-in, as the published original has, or
            scaled: the same for the injection, which lets small models start sooner.
        leak: the share of its state that the convergent map keeps at first.
        recompute: trade time for memory in the gradient.
    """

    design: Literal["original", "redesigned", "convergent"] = "redesigned"
    tokens: int = 256
    width: int = 128
    heads: int = 4
    inner: int = 512
    blocks: int = 3
    embed: int = 0
    cutoffs: tuple[int, ...] = ()
    shrink: int = 1
    dropout: float = 0.05
    attention_dropout: float = 0.0
    position_dropout: Literal["features", "offsets"] = "features"
    window: int = 0
    init: Literal["normal", "uniform", "scaled"] = "normal"
    leak: float = 0.7
    recompute: bool = False

    def __post_init__(self) -> None:
        check_fields(self, 1, "tokens", "width", "heads", "inner", "blocks", "shrink")
        check_fields(self, 0, "embed", "window")
        if self.width % 2 or self.width % self.heads:
            raise ValueError(
                f"width must be even and a multiple of heads, got {self.width} and {self.heads}"
            )


class Memory(NamedTuple):
    """What is kept of earlier tokens, without a graph: states (B, Lm, M), injections (B, Lm, 3D).

    M is D, or D for every block of the convergent design.
    """

    z: Tensor
    u: Tensor

    def followed_by(self, out: Output, most: int) -> Memory:
        """The last `most` tokens of this memory and a segment after it."""
        z, u = out.kept, out.u.detach()
        keep = max(0, most - z.shape[1])
        old = slice(max(0, self.z.shape[1] - keep), None)
        new = slice(max(0, z.shape[1] - most), None)
        return Memory(
            torch.cat((self.z[:, old], z[:, new]), dim=1),
            torch.cat((self.u[:, old], u[:, new]), dim=1),
        )


class Output(NamedTuple):
    """What a segment becomes.

    Args:
        states: (B, L, D) each: those that training samples, the last one the answer.
        u: (B, L, 3D) the injection.
        kept: (B, L, M) what a memory holds of the answer.
        f: the map of this solve, e.g. for regularisation.
        stats: of the solve.
    """

    states: list[Tensor]
    u: Tensor
    kept: Tensor
    f: Callable[[Tensor], Tensor]
    stats: SolverStat

    @property
    def z(self) -> Tensor:
        """The answer."""
        return self.states[-1]


class DEQTransformer(nn.Module):
    r"""A language model whose states solve one transformer layer, or iterate it.

    $$z^\star = f(z^\star; u, z_\text{past}, u_\text{past}), \quad u = W_u e(x) + b_u, \quad
    \log p(x_{t+1}) = \mathrm{softmax}(z^\star_t)$$

    The injection joins queries, keys and values in every block of every evaluation. Keys and values
    of the memory, keys of distances and the mask do not change during a solve: they are made once.

    Shapes: ids `(B, L)`, states `(B, L, D)`.

    Args:
        config: the shape.
        deq: options of the DEQ and of the norm of f's matrices.
    """

    def __init__(self, config: LMConfig, deq: Any = None) -> None:
        super().__init__()
        self.config, options = config, DEQConfig(deq)
        c = config
        self.vocabulary = AdaptiveVocabulary(
            c.tokens, c.width, c.embed or c.width, c.cutoffs, c.shrink
        )
        self.injection = nn.Linear(c.width, 3 * c.width)
        self.func = make_map(c)
        self.lexicon = Lexicon()
        self.embedding_drop = VariationalDropout1d(c.dropout)
        by_offset = c.position_dropout == "offsets"
        self.position_drop = (VariationalDropToken1d if by_offset else VariationalDropout1d)(
            c.dropout
        )
        self.output_norm = nn.LayerNorm(c.width) if c.design == "convergent" else nn.Identity()
        self.output_drop = VariationalDropToken1d(c.dropout)
        self._initialise()
        apply_norm(self.func, args=options)
        self.deq = get_deq(options, coupled=options.get("coupled", False))

    def forward(
        self, ids: Tensor, memory: Memory | None = None, z0: Tensor | None = None, **call: Any
    ) -> Output:
        """The states of a segment, given the memory of what came before.

        Args:
            ids: (B, L).
            memory: of the segments before; None at the start of a text.
            z0: where to start; zeros by default.
            **call: options of this call of the DEQ, e.g. `f_max_iter=24`.
        """
        if self.training:
            reset_dropout(self)
        reset_norm(self.func)
        u = self.inject(ids)
        return self.solve(u, self.contexts(u, memory), z0, **call)

    def inject(self, ids: Tensor) -> Tensor:
        """(B, L, 3D) the injection of tokens."""
        u: Tensor = self.injection(self.embedding_drop(self.vocabulary.embed(ids)))
        return u

    def solve(
        self, u: Tensor, contexts: list[Context], z0: Tensor | None = None, **call: Any
    ) -> Output:
        """The states in equilibrium with an injection and what `contexts` made of it."""

        def f(z: Tensor) -> Tensor:
            out: Tensor = self.func(z, contexts)
            return out

        if z0 is None:
            z0 = u.new_zeros(*u.shape[:2], self.config.width, dtype=self.injection.weight.dtype)
        if self.config.design == "redesigned":  # it has no residual to choose a state by
            call["solver_kwargs"] = {**(call.get("solver_kwargs") or {}), "return_final": True}
        states, stats = self.deq(f, z0, **call)
        kept = self.func.remember(states[-1].detach(), contexts)
        return Output(states, u, kept, f, stats)

    def contexts(self, u: Tensor, memory: Memory | None = None) -> list[Context]:
        """What each block needs besides the state."""
        memory = self.empty_memory(u) if memory is None else memory
        past, length = memory.z.shape[1], u.shape[1]
        if len(memory.z) != len(u):
            raise ValueError(f"the memory is of {len(memory.z)} streams, the tokens of {len(u)}")
        positions = sinusoids(past + length, self.config.width, like=memory.z)
        positions = self.position_drop(positions[None])[0]
        mask = causal_mask(length, past, self.config.window, like=u)
        return [
            Context(
                u,
                *block.attention.keys(block.remembered(z), memory.u),
                block.attention.distances(positions),
                mask,
            )
            for block, z in zip(self.func, self.func.recall(memory.z), strict=True)
        ]

    def empty_memory(self, like: Tensor) -> Memory:
        """The memory at the start of a text, for a batch like this one."""
        width, dtype = self.config.width, self.injection.weight.dtype
        z = like.new_zeros(len(like), 0, self.func.memory_states * width, dtype=dtype)
        return Memory(z, z.new_zeros(len(like), 0, 3 * width))

    def nll(self, z: Tensor, target: Tensor) -> Tensor:
        """(B, L) the negative log-likelihood of the tokens that follow."""
        return self.vocabulary.nll(self.output_drop(self.output_norm(z)), target)

    def log_prob(self, z: Tensor) -> Tensor:
        """(B, L, V) the log-probability of every token to follow."""
        return self.vocabulary.log_prob(self.output_drop(self.output_norm(z)))

    def _initialise(self) -> None:
        if self.config.init != "scaled":
            nn.init.normal_(self.injection.weight, std=0.01)
        for module in (self.injection, *self.func.modules()):
            if isinstance(module, nn.Linear):
                if self.config.init == "normal":
                    nn.init.normal_(module.weight, std=0.01)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm) and module.elementwise_affine:
                nn.init.normal_(module.weight, mean=1.0, std=0.01)


def make_map(config: LMConfig) -> Stack:
    """The map f of a design."""
    c = config
    kind = PostNormBlock if c.design == "original" else PreNormBlock
    blocks = [
        kind(c.width, c.heads, c.inner, c.dropout, c.attention_dropout, c.recompute)
        for _ in range(c.blocks)
    ]
    return LeakyStack(blocks, c.width, c.leak) if c.design == "convergent" else Stack(blocks)
