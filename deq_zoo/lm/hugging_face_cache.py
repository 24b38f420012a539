"""A cache of transformers that holds equilibria: one decoder for texts of equal length."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from deq_zoo.lm.decode import make_decoder
from deq_zoo.lm.decoder import Decoder
from deq_zoo.lm.language_model import LanguageModel


class EquilibriumCache(Cache):  # type: ignore[misc]
    """The texts of a batch that grow.

    Texts with the same number of tokens share a decoder; padding never enters one.

    Args:
        model: in evaluation mode.
        memory: tokens before a segment that the model remembers.
        length: tokens of a segment.
    """

    is_compileable = False

    def __init__(self, model: LanguageModel, memory: int, length: int) -> None:
        super().__init__(layers=[])
        self.model, self._sizes = model, (memory, length)
        self._length = 0  # positions seen, padding included
        self._padding: Tensor | None = None  # (B,) positions before each text
        self._groups: list[tuple[Tensor, Decoder]] = []  # rows of the batch, and their decoder

    def advance(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Add tokens (B, n); return their states (B, n, D).

        Args:
            ids: the tokens.
            mask: (B, positions so far and n), 0 for padding before a text; None without any.
        """
        first = not self._groups
        texts = sum(len(rows) for rows, _ in self._groups)
        if not first and len(ids) != texts:
            raise ValueError(
                f"the cache holds {texts} texts, and input_ids has {len(ids)}: pass the next "
                "tokens of these texts, or begin a new cache"
            )
        if mask is not None:
            check_no_holes(mask)
            _check_no_padding(mask[:, -1:] if first else mask[:, -ids.shape[1] :])
            self._check_same_padding(mask)
        if self._padding is None:
            self._padding = torch.zeros_like(ids[:, 0]) if mask is None else padding_before(mask)
            for amount in self._padding.unique().tolist():
                rows = (self._padding == amount).nonzero().flatten()
                self._groups.append((rows, make_decoder(self.model, *self._sizes)))
        states: Tensor | None = None
        for rows, decoder in self._groups:
            skipped = int(self._padding[rows[0]]) if first else 0
            z = decoder.advance(ids[rows, skipped:])
            if states is None:
                states = z.new_zeros(*ids.shape, z.shape[2])
            states[rows, skipped:] = z
        assert states is not None
        self._length += ids.shape[1]
        return states

    def _check_same_padding(self, mask: Tensor) -> None:
        """Raise `ValueError` if a mask hides other positions than that of the first tokens."""
        if self._padding is not None and not torch.equal(padding_before(mask), self._padding):
            raise ValueError(
                f"attention_mask has {padding_before(mask).tolist()} positions of padding before "
                f"the texts, and the cache has read texts with {self._padding.tolist()}: pass the "
                "mask of these texts, longer by the new tokens"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> EquilibriumCache:
        """Return a cache of the same texts, and of the same model, that grows on its own."""
        memo[id(self.model)] = self.model
        copy = type(self)(self.model, *self._sizes)
        copy._length, copy._padding = self._length, self._padding
        copy._groups = deepcopy(self._groups, memo)
        return copy

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of positions, padding included."""
        return self._length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: a text may grow without end."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Go on with other rows of the batch, as beam search does."""
        groups = []
        for rows, decoder in self._groups:
            member = (beam_idx[:, None] == rows).nonzero()  # (new row, place in the group)
            if len(member):
                decoder.select(member[:, 1])
                groups.append((member[:, 0], decoder))
        self._groups = groups
        self._padding = None if self._padding is None else self._padding[beam_idx]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every text."""
        count = sum(len(rows) for rows, _ in self._groups)
        device = self._groups[0][0].device
        self.reorder_cache(torch.arange(count, device=device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some texts."""
        self.reorder_cache(indices)

    def reset(self) -> None:
        """Forget all texts."""
        self._groups, self._length, self._padding = [], 0, None

    def crop(self, max_length: int) -> None:
        """Raise `NotImplementedError`: a decoder cannot take tokens back."""
        raise NotImplementedError("an EquilibriumCache cannot take tokens back: begin a new one")

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `NotImplementedError`: the model itself fills the cache."""
        raise NotImplementedError("an EquilibriumCache is filled by its model, through advance")


def padding_before(mask: Tensor) -> Tensor:
    """Return (B,) how many positions of padding come before each text of a mask (B, L)."""
    return (mask != 0).long().argmax(1)


def check_no_holes(mask: Tensor) -> None:
    """Raise `ValueError` if a mask (B, L) has a 0 between two tokens of a text."""
    changes = (mask != 0).long().diff(dim=1).abs().sum(1)
    begins = (mask[:, 0] != 0).long()
    if bool((changes > 2 - begins).any()):
        raise ValueError(
            "attention_mask has a 0 between two tokens of a text, and a text has no holes: drop "
            "these tokens from input_ids, and mask padding at the beginning or the end only"
        )


def _check_no_padding(mask: Tensor) -> None:
    """Raise `ValueError` if a mask has a 0 in positions that must be tokens."""
    if bool((mask == 0).any()):
        raise ValueError(
            "with a cache, padding must come before the texts: set tokenizer.padding_side='left'"
        )
