"""Writing: one token at a time, from equilibria of what is there already."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deq_zoo.checks import check_at_least, check_fields
from deq_zoo.lm.attention import Context, causal_mask, sinusoids
from deq_zoo.lm.model import DEQTransformer, Memory, Output
from deq_zoo.lm.tokens import Tokenizer, Words
from torchdeq import SolverStat, reset_norm


class Decoder(ABC):
    """A text that grows; `feed` says what may come next.

    Args:
        model: in evaluation mode.
        span: how many earlier tokens it remembers.
    """

    def __init__(self, model: DEQTransformer, span: int) -> None:
        if model.training:
            raise ValueError("decoding needs model.eval(): dropout would change every answer")
        check_at_least(1, span=span)
        self.model, self.span = model, span
        self.stats: SolverStat | None = None  # of the last solve
        reset_norm(model.func)

    @abstractmethod
    def feed(self, ids: Tensor) -> Tensor:
        """(B, V) log-probabilities of the token after `ids` (B, n), which join the text."""


class Incremental(Decoder):
    """Solves the new positions alone: earlier equilibria do not depend on later tokens.

    This needs a map with a fixed point. Keys and values of the past are kept, not its states. What
    is longer than the span is read in pieces of that length, as evaluation does: attention over all
    of a long prompt would cost its square, and reach further than was ever trained.

    Args:
        model: of the original or the convergent design.
        span: how many earlier tokens it remembers.
        warm: whether a token's solve starts at the equilibrium that the same token had when it last
            came up within the span, which is nearer than that of the token before; else at zeros.
            A solve that does not settle from there begins again at zeros, as reading does.
    """

    def __init__(self, model: DEQTransformer, span: int, warm: bool = True) -> None:
        super().__init__(model, span)
        if model.config.design == "redesigned":
            raise ValueError("the redesigned map has no fixed point to solve for: use Chunked")
        self.warm = warm
        self._past: list[tuple[Tensor, Tensor]] = []
        self._distances: list[Tensor] = []
        self._ids: Tensor | None = None  # (B, n) the text within the span
        self._states: Tensor | None = None  # (B, n, D) its equilibria

    @torch.no_grad()
    def feed(self, ids: Tensor) -> Tensor:
        *before, last = ids.split(self.span, dim=1)
        for piece in before:
            self._read(piece)
        return self.model.log_prob(self._read(last))[:, 0]

    def _read(self, ids: Tensor) -> Tensor:
        """(B, 1, D) the state of the last token."""
        u = self.model.inject(ids)
        z0, contexts = self._start(ids), self._contexts(u)
        out = self.model.solve(u, contexts, z0)
        if z0 is not None and self.model.deq.f_tol and bool(out.stats.failed.any()):
            out = self.model.solve(u, contexts)
        self._remember(ids, out)
        self.stats = out.stats
        return out.z[:, -1:]

    def _start(self, ids: Tensor) -> Tensor | None:
        """(B, n, D): for each token the state it last had, or zeros; None if all are new."""
        if self._ids is None or self._states is None:
            return None
        same = ids[:, :, None] == self._ids[:, None]  # (B, n, past)
        if not bool(same.any()):
            return None
        last = same.shape[2] - 1 - same.flip(2).byte().argmax(2)
        z = self._states.gather(1, last[..., None].expand(-1, -1, self._states.shape[2]))
        return torch.where(same.any(2, keepdim=True), z, 0)

    def _contexts(self, u: Tensor) -> list[Context]:
        if not self._past:
            self._past = [context[1:3] for context in self.model.contexts(u)]  # of no tokens
        past, length = self._past[0][0].shape[2], u.shape[1]
        mask = causal_mask(length, past, self.model.config.window, like=u)
        keys = self._keys_of_distances(past + length, u)
        return [Context(u, k, v, r, mask) for (k, v), r in zip(self._past, keys, strict=True)]

    def _keys_of_distances(self, keys: int, like: Tensor) -> list[Tensor]:
        """The last ones of a table that doubles when it is too short."""
        if not self._distances or self._distances[0].shape[2] < keys:
            table = sinusoids(2 * keys, self.model.config.width, like=like)
            self._distances = [b.attention.distances(table) for b in self.model.func]
        return [r[..., -keys:] for r in self._distances]

    def _remember(self, ids: Tensor, out: Output) -> None:
        func = self.model.func
        if self.warm:
            before = [] if self._ids is None else [self._ids]
            self._ids = torch.cat((*before, ids), dim=1)[:, -self.span :]
            before = [] if self._states is None else [self._states]
            self._states = torch.cat((*before, out.z), dim=1)[:, -self.span :]
        for n, (block, z) in enumerate(zip(func, func.recall(out.kept), strict=True)):
            new = block.attention.keys(block.remembered(z), out.u)
            k, v = (torch.cat(pair, dim=2) for pair in zip(self._past[n], new, strict=True))
            self._past[n] = k[:, :, -self.span :], v[:, :, -self.span :]


class Chunked(Decoder):
    """Computes the segment at hand again for every token, as evaluation does.

    For a map without a fixed point, whose states after a number of steps depend on how the text is
    cut: this is the very function that was trained.

    Args:
        model: of any design.
        span: how many tokens before the segment it remembers.
        length: of a segment.
    """

    def __init__(self, model: DEQTransformer, span: int, length: int) -> None:
        super().__init__(model, span)
        check_at_least(1, length=length)
        self.length = length
        self._memory: Memory | None = None
        self._segment: Tensor | None = None

    @torch.no_grad()
    def feed(self, ids: Tensor) -> Tensor:
        left = ids if self._segment is None else torch.cat((self._segment, ids), dim=1)
        while True:
            segment, left = left[:, : self.length], left[:, self.length :]
            out = self.model(segment, self._memory)
            if segment.shape[1] == self.length:
                past = self._memory or self.model.empty_memory(out.u)
                self._memory = past.followed_by(out, self.span)
            if not left.shape[1]:
                break
        self._segment = None if segment.shape[1] == self.length else segment
        self.stats = out.stats
        return self.model.log_prob(out.z[:, -1:])[:, 0]


def make_decoder(model: DEQTransformer, span: int, length: int) -> Decoder:
    """The fastest decoder that gives the model's own answers."""
    if model.config.design == "redesigned":
        return Chunked(model, span, length)
    return Incremental(model, span)


@dataclass(frozen=True)
class Sampling:
    """How to write.

    Args:
        prompt: the beginning.
        tokens: how many to add.
        temperature: below 1 bets on likely tokens; 0 takes the likeliest.
        top_k: choose among so many; 0 among all.
        top_p: choose among the likeliest tokens of this total probability.
        seed: of the choices.
        columns: of the text.
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
    """(B, 1) a token for each row of log-probabilities (B, V)."""
    if not options.temperature:
        return log_prob.argmax(1, keepdim=True)
    ranked, ids = log_prob.float().cpu().sort(dim=1, descending=True)
    # Relative to the likeliest, whose 0 stays 0 however low the temperature.
    p = ((ranked - ranked[:, :1]) / options.temperature).softmax(1)
    if options.top_p < 1:  # else nothing may go, and a sum's rounding would take some
        before = p.cumsum(1) - p  # probability of the tokens ranked higher
        p = torch.where(before < options.top_p, p, 0.0)
    if options.top_k:
        p[:, options.top_k :] = 0.0
    return ids.gather(1, torch.multinomial(p, 1, generator=rng)).to(log_prob.device)


def write(
    decoder: Decoder, tokenizer: Tokenizer, options: Sampling, device: torch.device
) -> Iterator[str]:
    """The text, prompt included, line by line as it grows."""
    rng = torch.Generator().manual_seed(options.seed)
    prompt = options.prompt
    if isinstance(tokenizer, Words):
        prompt = tokenizer.with_unknown(prompt)
    ids = tokenizer.encode(prompt).tolist() or tokenizer.encode("\n").tolist()
    new = torch.tensor([ids], device=device)
    written = 0
    for _ in range(options.tokens):
        # A model may have room for more tokens than its text had.
        new = choose(decoder.feed(new)[:, : tokenizer.size], options, rng)
        ids.append(int(new))
        text = tokenizer.decode(ids)
        for line in _whole_lines(text[written:], options.columns):
            written += len(line)
            yield line.rstrip("\n")
    rest = tokenizer.decode(ids)[written:]
    if rest.strip():
        yield rest


def _whole_lines(text: str, columns: int) -> Iterator[str]:
    """Lines that will not change any more: they end, or are full."""
    while "\n" in text or len(text) > columns:
        end = text.find("\n", 0, columns + 1) + 1
        if not end:
            end = text.rfind(" ", 0, columns + 1) + 1 or columns
        yield text[:end]
        text = text[end:]
