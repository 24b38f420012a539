"""Decoders: a text that grows token by token, and the probabilities of its next token."""

from __future__ import annotations

import torch
from torch import Tensor

from deq_zoo.lm.attention import Context, causal_mask, sinusoids
from deq_zoo.lm.attractor.decode import AttractorDecoder
from deq_zoo.lm.attractor.model import Attractor
from deq_zoo.lm.decoder import Decoder, last_tokens
from deq_zoo.lm.language_model import LanguageModel
from deq_zoo.lm.memory import LMOutput, Memory
from deq_zoo.lm.model import DEQTransformer
from torchdeq import reset_norm


class Incremental(Decoder):
    """A decoder that solves only for the new tokens: equilibria do not depend on later tokens.

    This needs a map with a fixed point, and a memory that keeps the input of every block: else the
    states of a segment depend on which of its tokens are solved together. The decoder keeps keys
    and values of the past.

    Args:
        model: of a design whose map has a fixed point.
        span: how many tokens before a segment the decoder remembers.
        length: tokens of a segment; as many as `span` by default.
        warm: start the solve for a token at the last equilibrium of the same token in the past,
            which is nearer than that of the token before; else at zeros. If the solve does not
            converge from there, it starts again at zeros; `stats.nfe` counts both solves.
    """

    model: DEQTransformer

    def __init__(
        self, model: DEQTransformer, span: int, length: int | None = None, warm: bool = True
    ) -> None:
        super().__init__(model, span, length)
        if not model.config.has_fixed_point:
            raise ValueError("the map of this model has no fixed point to solve for: use Chunked")
        if not _remembers_every_block(model):
            raise ValueError(
                f"the memory of this model keeps one state for {model.config.blocks} blocks, so "
                "that tokens solved one by one have other states than a segment: use Chunked"
            )
        reset_norm(model.func)
        self.warm = warm
        self._past: list[tuple[Tensor, Tensor]] = []
        self._distances: list[Tensor] = []
        self._ids: Tensor | None = None  # (B, n) the text in the cache
        self._states: Tensor | None = None  # (B, n, D) the equilibria of these tokens

    def _select(self, rows: Tensor) -> None:
        self._past = [(k[rows], v[rows]) for k, v in self._past]
        self._ids = None if self._ids is None else self._ids[rows]
        self._states = None if self._states is None else self._states[rows]

    def _read(self, ids: Tensor) -> Tensor:
        u = self.model.inject(ids)
        z0, contexts = self._find_start(ids), self._contexts(u)
        out = self.model.solve(u, contexts, z0)
        if z0 is not None and self.model.has_tolerance and bool(out.stats.failed.any()):
            spent = out.stats.nfe
            out = self.model.solve(u, contexts)
            out.stats.nfe += spent
        self._remember(ids, out)
        self.stats = out.stats
        return out.z

    def _find_start(self, ids: Tensor) -> Tensor | None:
        """Return for each token its last state or zeros, (B, n, D); None if all tokens are new."""
        if self._ids is None or self._states is None:
            return None
        same = ids[:, :, None] == self._ids[:, None]  # (B, n, past)
        if not bool(same.any()):
            return None
        last = same.shape[2] - 1 - same.flip(2).byte().argmax(2)
        z = self._states.gather(1, last[..., None].expand(-1, -1, self._states.shape[2]))
        return torch.where(same.any(2, keepdim=True), z, 0)

    def _contexts(self, u: Tensor) -> list[Context]:
        """Return everything besides the state that each block needs."""
        if not self._past:
            self._past = [context[1:3] for context in self.model.contexts(u)]  # of no tokens
        past, length = self._past[0][0].shape[2], u.shape[1]
        mask = causal_mask(length, past, self.model.config.window, like=u)
        keys = self._keys_of_distances(past + length, u)
        return [Context(u, k, v, r, mask) for (k, v), r in zip(self._past, keys, strict=True)]

    def _keys_of_distances(self, keys: int, like: Tensor) -> list[Tensor]:
        """Return the last columns of a table, which is doubled when it is too short."""
        if not self._distances or self._distances[0].shape[2] < keys:
            table = sinusoids(2 * keys, self.model.config.width, like=like)
            self._distances = [b.attention.distances(table) for b in self.model.func]
        return [r[..., -keys:] for r in self._distances]

    def _remember(self, ids: Tensor, out: LMOutput) -> None:
        """Keep tokens with their states, keys and values."""
        func = self.model.func
        if self.warm:
            before = [] if self._ids is None else [self._ids]
            self._ids = torch.cat((*before, ids), dim=1)
            before = [] if self._states is None else [self._states]
            self._states = torch.cat((*before, out.z), dim=1)
        for n, (block, z) in enumerate(zip(func, func.recall(out.kept), strict=True)):
            new = block.attention.keys(block.normalise_memory(z), out.u)
            k, v = (torch.cat(pair, dim=2) for pair in zip(self._past[n], new, strict=True))
            self._past[n] = k, v

    def _end_segment(self) -> None:
        span = self.span
        self._past = [
            (last_tokens(k, span, dim=2), last_tokens(v, span, dim=2)) for k, v in self._past
        ]
        self._ids = None if self._ids is None else last_tokens(self._ids, span)
        self._states = None if self._states is None else last_tokens(self._states, span)


class Chunked(Decoder):
    """A decoder that evaluates the current segment again for every token.

    For a map without a fixed point, the states after some steps depend on how the text is cut into
    segments; this decoder cuts it as training and evaluation do. So do unconverged states of the
    attractor as published.

    Args:
        model: of any design.
        span: how many tokens before a segment the decoder remembers.
        length: tokens of a segment; as many as `span` by default.
    """

    def __init__(self, model: LanguageModel, span: int, length: int | None = None) -> None:
        super().__init__(model, span, length)
        self._memory: Memory | None = None
        self._segment: Tensor | None = None
        self._out: LMOutput | None = None  # of the current segment

    def _read(self, ids: Tensor) -> Tensor:
        segment = ids if self._segment is None else torch.cat((self._segment, ids), dim=1)
        out: LMOutput = self.model(segment, memory=self._memory)
        self._segment, self._out, self.stats = segment, out, out.stats
        return out.z[:, -ids.shape[1] :]

    def _end_segment(self) -> None:
        assert self._out is not None
        past = self._memory or self.model.empty_memory(self._out.u)
        self._memory = past.followed_by(self._out, self.span)
        self._segment = self._out = None

    def _select(self, rows: Tensor) -> None:
        self._segment = None if self._segment is None else self._segment[rows]
        if self._memory is not None:
            self._memory = Memory(*(t[rows] for t in self._memory))


def _remembers_every_block(model: DEQTransformer) -> bool:
    """Return whether a remembered token gives every block what it gave it in its segment."""
    return model.func.memory_states == model.config.blocks


def make_decoder(model: LanguageModel, span: int, length: int) -> Decoder:
    """Return the fastest decoder with the probabilities that evaluation has.

    A decoder that solves only for new tokens has them up to the tolerance of the solves.

    Args:
        model: in evaluation mode.
        span: how many tokens before a segment the decoder remembers; 0 for none.
        length: tokens of a segment.
    """
    if isinstance(model, Attractor) and model.published is None:
        return AttractorDecoder(model, span, length)
    if (
        isinstance(model, DEQTransformer)
        and model.config.has_fixed_point
        and _remembers_every_block(model)
    ):
        return Incremental(model, span, length)
    return Chunked(model, span, length)
