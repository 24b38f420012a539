"""Tokenizers of the zoo as tokenizers of transformers."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Coder
from torch import Tensor, nn
from transformers import LogitsProcessor, PreTrainedTokenizerFast

from deq_zoo.lm.lexicon import Lexicon
from deq_zoo.lm.tokens import EOS, UNKNOWN, Bytes, Pieces, Tokenizer, Words

#: A token that no text has; its id is the first after those of the vocabulary.
PAD = "<|pad|>"
_ENDS = r"\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"  # of a line, as `str.splitlines` has them
_SPACES = r"[\s\x1c-\x1f\x85]+"  # where `str.split` cuts
_LINES = rf"[^{_ENDS}]*(?:\r\n|[{_ENDS}])|[^{_ENDS}]+"


class SilentLexicon(Lexicon):
    """A lexicon that is no part of the `state_dict`: transformers saves tokenizers on their own."""

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


class OnlyTokens(LogitsProcessor):  # type: ignore[misc]
    """Logits of minus infinity for ids that a tokenizer lacks.

    Args:
        size: tokens of the tokenizer.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores (B, V) after masking."""
        scores = scores.clone()
        scores[:, self.size :] = -torch.inf
        return scores


def as_fast_tokenizer(tokenizer: Tokenizer) -> Any:
    """Return a tokenizer of the zoo as one of transformers, with the same ids."""
    if isinstance(tokenizer, Pieces):
        coder = _pieces(tokenizer)
    elif isinstance(tokenizer, Bytes):
        coder = _bytes()
    elif isinstance(tokenizer, Words):
        coder = _words(tokenizer)
    else:
        raise TypeError(f"no tokenizer of transformers for {type(tokenizer).__name__}")
    return PreTrainedTokenizerFast(
        tokenizer_object=coder,
        pad_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # a text that spells the padding token is a text
    )


def _pieces(tokenizer: Pieces) -> Coder:
    """Return the coder of byte pairs, which cuts a text line by line."""
    coder = Coder.from_str(tokenizer.to_bytes().decode())
    lines = pre_tokenizers.Split(Regex(_LINES), behavior="isolated")
    coder.pre_tokenizer = pre_tokenizers.Sequence([lines, coder.pre_tokenizer])
    return coder


def _bytes() -> Coder:
    """Return a coder of bytes without merges."""
    vocabulary = {character: k for k, character in enumerate(_byte_characters())}
    coder = Coder(models.BPE(vocab=vocabulary, merges=[]))
    coder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    coder.decoder = decoders.ByteLevel()
    return coder


def _byte_characters() -> list[str]:
    """Return the characters by which byte-level coders name the bytes 0 to 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [k for k in range(256) if k not in printable]
    names = {k: chr(k) for k in printable} | {k: chr(256 + n) for n, k in enumerate(others)}
    return [names[k] for k in range(256)]


def _words(tokenizer: Words) -> Coder:
    """Return a coder of words between white space, with a token for the end of a line."""
    vocabulary = {word: k for k, word in enumerate(tokenizer.words)}
    known = {"unk_token": UNKNOWN} if UNKNOWN in vocabulary else {}
    coder = Coder(models.WordLevel(vocab=vocabulary, **known))
    coder.normalizer = normalizers.Replace("\n", f" {EOS} ")
    coder.pre_tokenizer = pre_tokenizers.Split(Regex(_SPACES), behavior="removed")
    ends = decoders.Replace(Regex(f" ?{EOS} ?"), "\n")
    joined = decoders.WordPiece(prefix="\0", cleanup=False)  # puts spaces between words
    coder.decoder = decoders.Sequence([joined, decoders.Fuse(), ends])
    return coder
