"""Decoding an attractor: one cache of keys and values at the equilibrium, for every block."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deq_zoo.lm.attention import causal_mask
from deq_zoo.lm.attractor.layers import Surroundings, rotate
from deq_zoo.lm.attractor.model import Attractor
from deq_zoo.lm.decoder import Decoder


class KeyCache:
    """The rotated keys and the values of the latest tokens, in buffers that grow by doubling."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None  # (2, blocks, B, H, capacity, e)
        self._first = self._end = 0

    def __len__(self) -> int:
        return self._end - self._first

    def read(self) -> Tensor | None:
        """Return keys and values (2, blocks, B, H, n, e), or None before the first token."""
        return None if self._buffer is None else self._buffer[..., self._first : self._end, :]

    def append(self, kv: Tensor) -> None:
        """Add keys and values (2, blocks, B, H, n, e) of new tokens."""
        if self._buffer is None or self._end + kv.shape[-2] > self._buffer.shape[-2]:
            self._buffer = self._with_room(kv)
        self._buffer[..., self._end : self._end + kv.shape[-2], :] = kv
        self._end += kv.shape[-2]

    def keep_last(self, count: int) -> None:
        """Forget all tokens but the last `count` ones."""
        self._first = max(self._first, self._end - count)

    def select(self, rows: Tensor) -> None:
        """Keep some texts of the batch."""
        if self._buffer is not None:
            self._buffer = self._buffer[:, :, rows]

    def _with_room(self, kv: Tensor) -> Tensor:
        """Return a buffer that begins with the tokens so far and has room for new ones."""
        new = kv.new_empty(*kv.shape[:-2], 2 * (len(self) + kv.shape[-2]), kv.shape[-1])
        old = self.read()
        if old is not None:
            new[..., : len(self), :] = old
        self._first, self._end = 0, len(self)
        return new


class Proposal(NamedTuple):
    """New tokens after the backbone.

    Args:
        c: (B, n, D) the output of the backbone.
        kept: what the cache keeps of the backbone.
        around: what each block needs besides the state.
    """

    c: Tensor
    kept: Tensor
    around: list[Surroundings]


class AttractorDecoder(Decoder):
    """A decoder that solves only for the new tokens: equilibria do not depend on later tokens.

    The cache has keys and values of every block, as that of an explicit transformer with as many
    blocks: those of the gated blocks at the equilibrium. Every sequence stops by itself.

    Args:
        model: of the design attractor, solved by positions.
        span: how many tokens before a segment the decoder remembers.
        length: tokens of a segment; as many as `span` by default.
    """

    model: Attractor

    def __init__(self, model: Attractor, span: int, length: int | None = None) -> None:
        super().__init__(model, span, length)
        if model.published is not None:
            raise ValueError(
                "mixing=published solves whole sequences, so that its unconverged states depend on "
                "later tokens: use Chunked, or mixing=positions"
            )
        self._cache, self._position = KeyCache(), 0

    def _select(self, rows: Tensor) -> None:
        self._cache.select(rows)

    def _read(self, ids: Tensor) -> Tensor:
        model, new = self.model, self.propose(ids)
        out = model.solve(new.c, new.around[model.config.backbone :], new.kept)
        self._append(new, out.kept)
        self.stats = out.stats
        return out.z

    def _end_segment(self) -> None:
        self._cache.keep_last(self.span)

    def propose(self, ids: Tensor) -> Proposal:
        """Return new tokens (B, n) after the backbone, without adding them to the text."""
        x = self.model.embed(ids)
        around = self._surroundings(x)
        c, kept = self.model.run_backbone(x, around)
        return Proposal(c, kept, around)

    def accept(self, new: Proposal, z: Tensor) -> None:
        """Add tokens to the text whose states (B, n, D) another program has solved for."""
        around = new.around[self.model.config.backbone :]
        kept = self.model.remember(z + new.c, around)
        self._append(new, torch.cat((new.kept, kept), dim=2))
        self._fill(z.shape[1])

    def core_cache(self) -> Tensor | None:
        """Return keys and values (2, blocks, B, H, n, e) of the gated blocks."""
        kv = self._cache.read()
        return None if kv is None else kv[:, self.model.config.backbone :]

    def _append(self, new: Proposal, kept: Tensor) -> None:
        heads, around = self.model.config.heads, new.around
        by_block = kept.unflatten(2, (len(around), 2, heads, -1))
        kv = by_block.permute(3, 2, 0, 4, 1, 5)  # (2, blocks, B, H, L, e)
        k = rotate(kv[0], around[0].cos, around[0].sin)
        self._cache.append(torch.stack((k, kv[1])))
        self._position += kept.shape[1]

    def _surroundings(self, x: Tensor) -> list[Surroundings]:
        """Return everything besides the state that each block needs."""
        model, length = self.model, x.shape[1]
        positions = torch.arange(self._position, self._position + length, device=x.device)
        cos, sin = model.rotary(positions, like=x)
        mask = causal_mask(length, len(self._cache), model.config.window, like=x)
        kv = self._cache.read()
        if kv is None:
            return [each._replace(mask=mask) for each in model.surroundings(x)]
        return [Surroundings(cos, sin, k, v, mask) for k, v in zip(*kv, strict=True)]
