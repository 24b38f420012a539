"""The DEQ transformer: a language model whose hidden states are equilibria."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from deq_zoo.lm.adaptive import AdaptiveVocabulary
from deq_zoo.lm.attention import Context, causal_mask, sinusoids
from deq_zoo.lm.config import LMConfig
from deq_zoo.lm.language_model import LanguageModel
from deq_zoo.lm.layers import Stack, make_map
from deq_zoo.lm.memory import LMOutput, Memory
from torchdeq import (
    DEQConfig,
    VariationalDropout1d,
    VariationalDropToken1d,
    apply_norm,
    get_deq,
    reset_dropout,
    reset_norm,
)


class DEQTransformer(LanguageModel):
    r"""A language model whose hidden states solve, or iterate, one map of transformer blocks.

    $$z^\star = f(z^\star; u, z_\text{past}, u_\text{past}), \quad u = W_u e(x) + b_u, \quad
    \log p(x_{t+1}) = \mathrm{softmax}(z^\star_t)$$

    The injection u joins queries, keys and values in every block of every evaluation. Keys and
    values of the memory, keys of distances and the mask are the same in all evaluations of a solve,
    so the model computes them once.

    Shapes: ids `(B, L)`, states `(B, L, D)`.

    Args:
        config: the shape.
        deq: options of the DEQ and of the norm of the matrices in f: a `DEQConfig`, dict or
            Namespace.
    """

    def __init__(self, config: LMConfig, deq: Any = None) -> None:
        super().__init__(config)
        options, c = DEQConfig(deq), config
        if c.design == "attractor":
            raise ValueError("the design attractor has a class of its own: build Attractor")
        self.vocabulary = AdaptiveVocabulary(
            c.tokens, c.width, c.embed or c.width, c.cutoffs, c.shrink
        )
        self.injection = nn.Linear(c.width, 3 * c.width)
        self.func: Stack = make_map(c)
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
        self, ids: Tensor, z0: Tensor | None = None, *, memory: Memory | None = None, **call: Any
    ) -> LMOutput:
        """Return the hidden states of a segment, given the memory of the text before it.

        Args:
            ids: (B, L) tokens.
            z0: (B, L, D) states to start from; zeros by default.
            memory: of the segments before; None at the beginning of a text.
            **call: options of this call of the DEQ, e.g. `f_max_iter=24`.
        """
        if self.training:
            reset_dropout(self)
        reset_norm(self.func)
        u = self.inject(ids)
        return self.solve(u, self.contexts(u, memory), z0, **call)

    def inject(self, ids: Tensor) -> Tensor:
        """Return the injection (B, L, 3D) of tokens (B, L)."""
        u: Tensor = self.injection(self.embedding_drop(self.vocabulary(ids)))
        return u

    def solve(
        self, u: Tensor, contexts: list[Context], z0: Tensor | None = None, **call: Any
    ) -> LMOutput:
        """Return the states in equilibrium with an injection.

        Args:
            u: (B, L, 3D) the injection.
            contexts: of `contexts`, one for each block.
            z0: (B, L, D) states to start from; zeros by default.
            **call: options of this call of the DEQ.
        """

        def f(z: Tensor, *own: tuple[Tensor, Tensor, Tensor]) -> Tensor:
            given = contexts
            if own:
                given = [Context(*t, c.r, c.mask) for t, c in zip(own, contexts, strict=True)]
            out: Tensor = self.func(z, given)
            return out

        if z0 is None:
            z0 = u.new_zeros(*u.shape[:2], self.config.width, dtype=self.dtype)
        if not self.config.has_fixed_point:  # residuals say nothing about which state is best
            call["solver_kwargs"] = {**(call.get("solver_kwargs") or {}), "return_final": True}
        if call.get("compact"):  # streams leave with their injection, keys and values
            call["args"] = tuple(tuple(context[:3]) for context in contexts)
        states, stats = self.deq(f, z0, **call)
        z = states[-1].detach()
        kept = self.func.remember(z, contexts)
        return LMOutput(predictions=states, state=z, stats=stats, u=u, kept=kept, f=f)

    def contexts(self, u: Tensor, memory: Memory | None = None) -> list[Context]:
        """Return everything besides the state that each block needs."""
        memory = self.empty_memory(u) if memory is None else memory
        past, length = memory.z.shape[1], u.shape[1]
        streams = u.shape[0]  # not len(u): that fixes the batch of an exported program
        if memory.z.shape[0] != streams:
            raise ValueError(f"the memory is of {len(memory.z)} streams, the tokens of {streams}")
        positions = sinusoids(past + length, self.config.width, like=memory.z)
        positions = self.position_drop(positions[None])[0]
        mask = causal_mask(length, past, self.config.window, like=u)
        return [
            Context(
                u,
                *block.attention.keys(block.normalise_memory(z), memory.u),
                block.attention.distances(positions),
                mask,
            )
            for block, z in zip(self.func, self.func.recall(memory.z), strict=True)
        ]

    def empty_memory(self, like: Tensor) -> Memory:
        """Return the memory at the beginning of a text, for a batch of the size of `like`."""
        width, dtype = self.config.width, self.dtype
        streams = like.shape[0]
        z = like.new_zeros(streams, 0, self.func.memory_states * width, dtype=dtype)
        return Memory(z, z.new_zeros(streams, 0, 3 * width))

    def nll(self, z: Tensor, target: Tensor) -> Tensor:
        """Return the negative log-likelihood (B, L) of the tokens that follow, in nats."""
        return self.vocabulary.nll(self.output_drop(self.output_norm(z)), target)

    def log_prob(self, z: Tensor) -> Tensor:
        """Return the log-probability (B, L, V) of every token to follow."""
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
