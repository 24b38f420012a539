"""Language modelling: predict the next token, remembering the segments before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import log
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from deq_zoo.checks import check_fields
from deq_zoo.errors import DataError, ZooError
from deq_zoo.lm import data as corpora
from deq_zoo.lm.convert import from_authors
from deq_zoo.lm.data import Corpus, Streams
from deq_zoo.lm.decode import Sampling, make_decoder, write
from deq_zoo.lm.model import DEQTransformer, LMConfig, Memory, Output
from deq_zoo.lm.reading import Reading, steps_curve, unwrapped
from deq_zoo.lm.settings import check_data, check_training
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

    Perplexity is `exp` of the mean negative log-likelihood in nats over all predicted tokens, the
    streams read from empty memory. The first token of a stream is not predicted, nor is what does
    not fill a column of streams, so it depends a little on `eval_batch`.

    Args:
        net: the shape of the model.
        deq: options of the equilibrium, its Jacobian's regularisation among them.
        data: wikitext (words, from `data_dir`), file (any text), topics (Python's own reference),
            counting (for tests).
        data_dir: folder with WikiText's files.
        file: of `data="file"`.
        pieces: byte-pair pieces of a text that is not WikiText; 0 takes bytes.
        split: what evaluation reads, in the vocabulary of the model.
        batch: streams of training.
        length: tokens of a segment.
        memory: tokens remembered from segments before.
        eval_batch: streams of evaluation.
        eval_memory: tokens remembered there; 0 is `memory`.
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
        check_fields(self, 1, "batch", "length", "memory", "eval_batch")
        check_fields(self, 0, "pieces", "eval_memory", "eval_limit", "consistency", "ahead")
        deq = self.deq
        if deq.n_states > 1 or deq.indexing or deq.sup_gap > 0 or deq.sup_loc:
            raise ValueError(
                "a language model decodes one state: drop n_states, indexing, sup_gap and sup_loc"
            )

    @cached_property
    def corpus(self) -> Corpus:
        """The data."""
        check_data(self)
        if self.data == "wikitext":
            corpus = corpora.wikitext(self.data_dir)
        else:
            corpus = corpora.tokenised(self._text(), self.pieces)
        if corpus.tokenizer.size > self.net.tokens:
            raise DataError(
                f"the text has {corpus.tokenizer.size} different tokens, the model "
                f"{self.net.tokens}: --set net.tokens={corpus.tokenizer.size}"
            )
        return corpus

    def _text(self) -> str:
        if self.data == "file":
            return corpora.read_text(self.file)
        return corpora.topics() if self.data == "topics" else corpora.counting()

    @cached_property
    def _train(self) -> Streams:
        self._judged(self.corpus.tokenizer)  # what is wrong with it is told before training
        return Streams.of(self.corpus.train, self.batch, self.length)

    def build(self) -> nn.Module:
        check_training(self)
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
        lexicon.adopt(self.corpus.tokenizer)  # from now on its checkpoints can read and write

    def samples(self, batch: Segment) -> int:
        return batch[0].numel()

    def evaluate(self, model: nn.Module, device: torch.device, thorough: bool) -> Evaluation:
        tokenizer = self._tokenizer(model)
        ids, streams = self._judged(tokenizer)
        record, read = SolverRecord(), Reading(model, self._eval_memory, device)
        for k, (data, target) in enumerate(streams.segments()):
            if self.eval_limit and k >= self.eval_limit:
                break
            record.add(read(data, target))
            if thorough and k == 0:  # a few tokens: a radius costs a hundred products
                few = model(data[:2].to(device), sradius_mode=True)
                record.radii += few.stats["sradius"].tolist()
        return Evaluation(_metrics(read, tokenizer, ids), record)

    def _judged(self, tokenizer: Tokenizer, split: str = "") -> tuple[Tensor, Streams]:
        """The ids of a held-out split in a vocabulary, and the streams that evaluation reads."""
        check_data(self)
        split = split or self.split
        if self.data == "wikitext":
            ids = corpora.wikitext_split(self.data_dir, split, tokenizer)
        else:
            ids = tokenizer.encode(corpora.split_text(self._text())[split])
        return ids, Streams.of(ids, self.eval_batch, self.length)

    def _tokenizer(self, model: nn.Module) -> Tokenizer:
        """The model's own: another text must not bring another vocabulary.

        Released weights come without, and have that of their training text.
        """
        lexicon = unwrapped(model).lexicon
        if lexicon.tokenizer is not None or (self.data == "wikitext" and self.data_dir is None):
            return lexicon.require()
        found = self.corpus.tokenizer
        if isinstance(found, Words) and found.size != self.net.tokens:
            raise DataError(
                f"these weights came without their {self.net.tokens} words, and {self.data_dir} "
                f"has {found.size}: name the folder of the text they were trained with, or set "
                "model.lexicon.tokenizer"
            )
        return found

    @property
    def _eval_memory(self) -> int:
        return self.eval_memory or self.memory

    def convert(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        words = {"lexicon._extra_state": Lexicon().get_extra_state()}
        return from_authors(self.net, state) | words

    def predict(
        self, model: nn.Module, files: Sequence[Path], out: Path | None, device: torch.device
    ) -> list[str]:
        if out is not None:
            raise ZooError("the perplexity of a text is printed, not written: drop --out")
        tokenizer, lines = self._tokenizer(model), []
        for file in files:
            text, told = corpora.read_text(file), ""
            if isinstance(tokenizer, Words):
                unknown, text = tokenizer.count_unknown(text), tokenizer.with_unknown(text)
                told = f"; of its words, {unknown} are unknown" if unknown else ""
            ids = tokenizer.encode(text)
            if len(ids) < 2:
                raise DataError(f"{file} has {len(ids)} tokens: a perplexity needs 2 at least")
            read = Reading(model, self._eval_memory, device)
            for segment in Streams.of(ids, 1, self.length).segments():
                with torch.no_grad():
                    read(*segment)
            lines.append(f"{file}: perplexity {read.perplexity:.4g} over {read.count} tokens{told}")
        return lines

    def sampling(self) -> Sampling:
        return Sampling()

    def sample(
        self, model: nn.Module, options: Sampling, out: Path, device: torch.device
    ) -> Iterator[str]:
        inner = unwrapped(model)
        decoder = make_decoder(inner, self._eval_memory, self.length)
        return write(decoder, self._tokenizer(inner), options, device)

    @torch.no_grad()
    def pictures(self, model: nn.Module, device: torch.device) -> list[Picture]:
        from deq_zoo.lm.pictures import loss_by_steps, page

        tokenizer = self._tokenizer(model)
        ids, streams = self._judged(tokenizer, "valid")
        curve = steps_curve(model, streams, self._eval_memory, device)
        start = _opening(tokenizer.decode(ids[:60].tolist()))
        lines = self.sample(model, replace(Sampling(), prompt=start, tokens=300), Path(), device)
        return [page(start, "\n".join(lines)), loss_by_steps(curve)]


def last_step(before: Tensor, after: Tensor) -> Tensor:
    """Return the mean over tokens of $|z_k - z_{k-1}|^2 / |z_k|^2$: larger states do not help."""
    size = after.detach().square().sum(-1).clamp_min(1e-12)
    return ((after - before).square().sum(-1) / size).mean()


def _metrics(read: Reading, tokenizer: Tokenizer, ids: Tensor) -> dict[str, float]:
    told = {"perplexity": read.perplexity, "loss": read.mean}
    if not isinstance(tokenizer, Words):
        size = len(tokenizer.decode(ids.tolist()).encode())
        told["bits_per_byte"] = read.mean / log(2) * len(ids) / max(1, size)
    return told


def _opening(text: str) -> str:
    """The first words of a text, which end where a word does."""
    text = text.strip()
    return text[: text.rfind(" ")] if " " in text else text
