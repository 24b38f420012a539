"""Language modelling: predict the next token, remembering the segments before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import exp, inf, log
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from deq_zoo.errors import DataError
from deq_zoo.lm import data as corpora
from deq_zoo.lm.convert import from_authors
from deq_zoo.lm.data import Corpus, Streams
from deq_zoo.lm.decode import Sampling, make_decoder, write
from deq_zoo.lm.model import DEQTransformer, LMConfig, Memory, Output
from deq_zoo.lm.reading import Reading, steps_curve, unwrapped
from deq_zoo.lm.tokens import Lexicon, Tokenizer, Words
from deq_zoo.record import SolverRecord
from deq_zoo.task import Evaluation, Loss, Picture, Score, Shard, Task, generator
from torchdeq import DEQConfig, jac_reg


class Segment(NamedTuple):
    """A batch.

    Args:
        ids: (S, L) tokens.
        target: (S, L) those after them.
        first: whether a text begins here, without memory.
        jac_weight: of the Jacobian's regularisation at this step.
        ahead: evaluations of f before those with a gradient.
    """

    ids: Tensor
    target: Tensor
    first: bool
    jac_weight: float
    ahead: int | None


@dataclass(frozen=True)
class LanguageTask(Task):
    """A text, read by several streams side by side; the negative log-likelihood of what follows.

    Perplexity is ``exp`` of the mean negative log-likelihood in nats over all predicted tokens, the
    streams read from empty memory. The first token of a stream is not predicted, nor is what does
    not fill a column of streams, so it depends a little on ``eval_batch``.

    Args:
        net: the shape of the model.
        deq: options of the equilibrium, its Jacobian's regularisation among them.
        data: wikitext (words, from ``data_dir``), file (any text), topics (Python's own reference),
            counting (for tests).
        data_dir: folder with WikiText's files.
        file: of ``data="file"``.
        pieces: byte-pair pieces of a text that is not WikiText; 0 takes bytes.
        split: what evaluation reads.
        batch: streams of training.
        length: tokens of a segment.
        memory: tokens remembered from segments before.
        eval_batch: streams of evaluation.
        eval_memory: tokens remembered there; 0 is ``memory``.
        eval_limit: segments of an evaluation; 0 is all.
        consistency: weight of the last step's squared relative length, a loss that makes unrolled
            steps converge.
        ahead: up to so many evaluations without a gradient, drawn at random, come before those
            with one: states after more steps are trained, too.
    """

    score: ClassVar[Score] = Score("perplexity", higher_is_better=False)

    net: LMConfig = field(default_factory=LMConfig)
    deq: DEQConfig = field(default_factory=DEQConfig)
    data: Literal["wikitext", "file", "topics", "counting"] = "wikitext"
    data_dir: str | None = None
    file: str | None = None
    pieces: int = 0
    split: Literal["valid", "test"] = "valid"
    batch: int = 16
    length: int = 64
    memory: int = 64
    eval_batch: int = 16
    eval_memory: int = 0
    eval_limit: int = 0
    consistency: float = 0.0
    ahead: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "length", "memory", "eval_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("pieces", "eval_memory", "eval_limit", "consistency", "ahead"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.deq.n_states > 1 or self.deq.indexing:
            raise ValueError("a language model decodes one state: drop n_states and indexing")
        if self.consistency and (self.deq.implicit or self.deq.grad[0] < 2):
            raise ValueError("consistency compares unrolled steps: it needs grad >= 2 without ift")

    @cached_property
    def corpus(self) -> Corpus:
        """The data."""
        if self.data == "wikitext":
            corpus = corpora.wikitext(self.data_dir)
        elif self.data == "file":
            corpus = corpora.text_file(self.file, self.pieces)
        elif self.data == "topics":
            corpus = corpora.topics(self.pieces)
        else:
            corpus = corpora.counting(self.pieces)
        if corpus.tokenizer.size > self.net.tokens:
            raise DataError(
                f"the text has {corpus.tokenizer.size} different tokens, the model "
                f"{self.net.tokens}: --set net.tokens={corpus.tokenizer.size}"
            )
        return corpus

    @cached_property
    def _train(self) -> Streams:
        return Streams.of(self.corpus.train, self.batch, self.length)

    def build(self) -> nn.Module:
        deq = self.deq
        if self.consistency:
            deq = deq.with_options(sup_loc=[deq.grad[0] - 1])
        return DEQTransformer(self.net, deq)

    @property
    def steps_per_epoch(self) -> int:
        return len(self._train)

    def train_batch(self, step: int, seed: int, shard: Shard) -> Segment:
        k = step % len(self._train)
        ids, target = self._train.segment(k, shard)
        rng = generator("step", seed, step)
        weight = self._jac_weight(step)
        if weight and float(torch.rand((), generator=rng)) >= self.deq.jac_loss_freq:
            weight = 0.0
        ahead = int(torch.randint(self.ahead + 1, (), generator=rng)) if self.ahead else None
        return Segment(ids, target, k == 0, weight, ahead)

    def _jac_weight(self, step: int) -> float:
        deq = self.deq
        if not deq.jac_loss_weight:
            return 0.0
        rises = step // deq.jac_incremental if deq.jac_incremental else 0
        return deq.jac_loss_weight + 0.1 * rises

    def loss(self, model: nn.Module, batch: Segment, carry: Any) -> Loss:
        segment = Segment(*batch)
        memory = None if segment.first or carry is None else Memory(*carry)
        call = {} if segment.ahead is None else {"f_max_iter": segment.ahead}
        out: Output = model(segment.ids, memory, **call)
        inner = unwrapped(model)
        nll = inner.nll(out.z, segment.target).mean()
        value, metrics = nll, {"nll": nll}
        if segment.jac_weight:
            value = value + segment.jac_weight * jac_reg(out.f(out.z), out.z)
        if self.consistency:
            change = last_step(out.states[-2], out.states[-1])
            value, metrics = value + self.consistency * change, {**metrics, "last_step": change}
        memory = memory or inner.empty_memory(out.u)
        new = memory.followed_by(out, self.memory)
        return Loss(value, metrics, out.stats if out.stats.nfe else None, new)

    def after_step(self, model: nn.Module) -> None:
        lexicon = model.get_submodule("lexicon")
        assert isinstance(lexicon, Lexicon)
        if lexicon.tokenizer is None:  # from now on its checkpoints can read and write
            lexicon.tokenizer = self.corpus.tokenizer

    def samples(self, batch: Segment) -> int:
        return batch[0].numel()

    def evaluate(self, model: nn.Module, device: torch.device, thorough: bool) -> Evaluation:
        ids = self.corpus.valid if self.split == "valid" else self.corpus.test
        if ids is None:
            raise DataError(f"{self.data_dir} holds no test.txt or wiki.test.tokens")
        streams = Streams.of(ids, self.eval_batch, self.length)
        record, read = SolverRecord(), Reading(model, self._eval_memory, device)
        for k, (data, target) in enumerate(streams.segments()):
            if self.eval_limit and k >= self.eval_limit:
                break
            record.add(read(data, target))
            if thorough and k == 0:  # a few tokens: a radius costs a hundred products
                few = model(data[:2].to(device), sradius_mode=True)
                record.radii += few.stats["sradius"].tolist()
        return Evaluation(_metrics(read.mean, self.corpus.tokenizer, ids), record)

    @property
    def _eval_memory(self) -> int:
        return self.eval_memory or self.memory

    def convert(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        words = {"lexicon._extra_state": Lexicon().get_extra_state()}
        return from_authors(self.net, state) | words

    def predict(
        self, model: nn.Module, files: Sequence[Path], out: Path | None, device: torch.device
    ) -> list[str]:
        tokenizer = unwrapped(model).lexicon.require()
        lines = []
        for file in files:
            text = file.read_text(encoding="utf-8", errors="replace")
            if isinstance(tokenizer, Words):
                text = tokenizer.with_unknown(text)
            read = Reading(model, self._eval_memory, device)
            for ids, target in Streams.of(tokenizer.encode(text), 1, self.length).segments():
                with torch.no_grad():
                    read(ids, target)
            lines.append(f"{file}: perplexity {exp(read.mean):.4g} over {read.count} tokens")
        return lines

    def sampling(self) -> Sampling:
        return Sampling()

    def sample(
        self, model: nn.Module, options: Sampling, out: Path, device: torch.device
    ) -> Iterator[str]:
        inner = unwrapped(model)
        decoder = make_decoder(inner, self._eval_memory, self.length)
        return write(decoder, inner.lexicon.require(), options, device)

    @torch.no_grad()
    def pictures(self, model: nn.Module, device: torch.device) -> list[Picture]:
        from deq_zoo.lm.pictures import loss_by_steps, page

        data = Streams.of(self.corpus.valid, self.eval_batch, self.length)
        curve = steps_curve(model, data, self._eval_memory, device)
        start = _opening(self.corpus)
        lines = self.sample(model, replace(Sampling(), prompt=start, tokens=300), Path(), device)
        return [page(start, "\n".join(lines)), loss_by_steps(curve)]


def last_step(before: Tensor, after: Tensor) -> Tensor:
    r"""The mean over tokens of :math:`|z_k - z_{k-1}|^2 / |z_k|^2`; growing is no way out."""
    size = after.detach().square().sum(-1).clamp_min(1e-12)
    return ((after - before).square().sum(-1) / size).mean()


def _metrics(nats: float, tokenizer: Tokenizer, ids: Tensor) -> dict[str, float]:
    told = {"perplexity": exp(nats) if nats < 700 else inf, "loss": nats}
    if not isinstance(tokenizer, Words):
        size = len(tokenizer.decode(ids.tolist()).encode())
        told["bits_per_byte"] = nats / log(2) * len(ids) / max(1, size)
    return told


def _opening(corpus: Corpus) -> str:
    """The first words of the held-out text, which end where a word does."""
    text = corpus.tokenizer.decode(corpus.valid[:60].tolist()).strip()
    return text[: text.rfind(" ")] if " " in text else text
