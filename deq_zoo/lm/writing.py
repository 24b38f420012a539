"""Writing a text: which token comes next, and lines as soon as they are complete."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deq_zoo.checks import check_fields
from deq_zoo.lm.decoder import Decoder
from deq_zoo.lm.tokens import Tokenizer, Words


@dataclass(frozen=True)
class Sampling:
    """The options of writing.

    Args:
        prompt: the beginning of the text.
        tokens: how many tokens to add.
        temperature: a value below 1 prefers likely tokens; 0 takes the likeliest.
        top_k: choose among so many of the likeliest tokens; 0 among all.
        top_p: choose among the likeliest tokens of this total probability.
        seed: of the random choices.
        columns: the longest line on the screen.
    """

    prompt: str = ""
    tokens: int = 200
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    columns: int = 80

    def __post_init__(self) -> None:
        check_fields(self, 0, "tokens", "top_k", "temperature", finite=True)
        check_fields(self, 1, "columns")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be a number from 0 to 2**63 - 1, got {self.seed}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")


def choose(log_prob: Tensor, options: Sampling, rng: torch.Generator) -> Tensor:
    """Return a token (B, 1) for each row of log-probabilities (B, V)."""
    if not options.temperature:
        return log_prob.argmax(1, keepdim=True)
    ranked, ids = log_prob.float().cpu().sort(dim=1, descending=True)
    # Relative to the likeliest, whose 0 stays 0 at any temperature; in single precision a very
    # small one would be 0, and a very large one infinite.
    temperature = min(max(options.temperature, 1e-30), 1e30)
    p = ((ranked - ranked[:, :1]) / temperature).softmax(1)
    if options.top_p < 1:  # at 1 every token must stay, and the sum below may round to above 1
        before = p.cumsum(1) - p  # probability of the tokens ranked higher
        p = torch.where(before < options.top_p, p, 0.0)
    if options.top_k:
        p[:, options.top_k :] = 0.0
    return ids.gather(1, torch.multinomial(p, 1, generator=rng)).to(log_prob.device)


class Writing:
    """A text that a model writes while the caller iterates over its lines, once.

    A prompt begins a paragraph: the model reads an empty line before it, which is not in the text.
    A prompt may end in the middle of a word, where a training text has no end of a piece. So the
    model chooses the last piece of the prompt again, among all pieces that begin with it.

    Args:
        decoder: at the beginning of a text.
        tokenizer: of the model.
        options: prompt, length and choice of tokens.
    """

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, options: Sampling) -> None:
        self.decoder, self.tokenizer, self.options = decoder, tokenizer, options
        prompt = options.prompt
        if isinstance(tokenizer, Words):
            prompt = tokenizer.with_unknown(prompt)
        before = tokenizer.encode("\n\n").tolist()
        self._before = len(before)
        self._ids: list[int] = before + tokenizer.encode(prompt).tolist()
        self._begun = False

    @property
    def text(self) -> str:
        """Return the text so far, with its prompt and without the line breaks of the screen."""
        return self.tokenizer.decode(self._ids[self._before :])

    def __iter__(self) -> Iterator[str]:
        """Yield the text, line by line as it grows."""
        if self._begun:
            raise RuntimeError("this text is written: make a new Writing, with a new decoder")
        self._begun = True
        rng = torch.Generator().manual_seed(self.options.seed)
        new = self._complete_last_piece(rng)
        printed = 0
        for _ in range(self.options.tokens):
            log_prob = self._feed(new)
            new = choose(log_prob, self.options, rng)
            self._ids.append(int(new))
            for line in _complete_lines(self.text[printed:], self.options.columns):
                printed += len(line)
                yield line.rstrip("\n")
        rest = self.text[printed:]
        if rest.strip():
            yield rest

    def _feed(self, new: Tensor) -> Tensor:
        """Read tokens (1, n); return log-probabilities (1, V) of the next one."""
        # A model may have room for more tokens than its tokenizer has.
        return self.decoder.feed(new)[:, : self.tokenizer.size]

    def _complete_last_piece(self, rng: torch.Generator) -> Tensor:
        """Choose the last piece of the prompt again; return the tokens to read next, (1, n)."""
        ids = torch.tensor([self._ids], device=self.decoder.device)
        longer = self.tokenizer.beginning_with(self._ids[-1])
        if not self.options.tokens or len(longer) < 2 or len(self._ids) == self._before:
            return ids
        log_prob = self._feed(ids[:, :-1])
        allowed = torch.full_like(log_prob, -torch.inf)
        allowed[:, longer] = log_prob[:, longer]
        last = choose(allowed, self.options, rng)
        self._ids[-1] = int(last)
        return last


def _complete_lines(text: str, columns: int) -> Iterator[str]:
    """Yield the lines that cannot change any more: they have an end, or are full."""
    while "\n" in text or len(text) > columns:
        end = text.find("\n", 0, columns + 1) + 1
        if not end:
            end = text.rfind(" ", 0, columns + 1) + 1 or columns
        yield text[:end]
        text = text[end:]
