"""The tokenizer inside a model, so that a checkpoint can read and write text."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deq_zoo.errors import ZooError
from deq_zoo.lm.tokens import KINDS, Tokenizer


class Lexicon(nn.Module):
    """The tokenizer with which a model was trained, as extra state of the `state_dict`.

    It has no parameters, and is empty until training or the user sets `tokenizer`.
    """

    tokenizer: Tokenizer | None = None

    def get_extra_state(self) -> Tensor:
        if self.tokenizer is None:
            return torch.empty(0, dtype=torch.uint8)
        content = self.tokenizer.kind.encode() + b"\n" + self.tokenizer.to_bytes()
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        kind, _, content = state.cpu().numpy().tobytes().partition(b"\n")
        self.tokenizer = KINDS[kind.decode()].from_bytes(content) if kind else None

    def adopt(self, tokenizer: Tokenizer) -> None:
        """Keep a tokenizer; raise `ZooError` if there is another one already."""
        own = self.tokenizer
        if own is tokenizer:
            return
        if own is not None and (
            own.kind != tokenizer.kind or own.to_bytes() != tokenizer.to_bytes()
        ):
            raise ZooError(
                "the training text has another vocabulary than these weights were trained with: "
                "the text has changed since, or it is another text"
            )
        self.tokenizer = tokenizer

    def require(self) -> Tokenizer:
        """Return the tokenizer, or raise `ZooError` if there is none."""
        if self.tokenizer is None:
            raise ZooError(
                "these weights came without their vocabulary: name the folder of the text they "
                "were trained with (--data-dir), or set model.lexicon.tokenizer"
            )
        return self.tokenizer
