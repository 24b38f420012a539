"""Language modelling: predict the next token, with a memory of the segments before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import log
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from deq_zoo.checks import check_fields
from deq_zoo.errors import DataError, ZooError
from deq_zoo.exportable import Exportable
from deq_zoo.lm import data as corpora
from deq_zoo.lm.attractor import published
from deq_zoo.lm.build import build_model
from deq_zoo.lm.config import LMConfig
from deq_zoo.lm.convert import from_authors, to_authors
from deq_zoo.lm.data import Corpus, Segment, Streams
from deq_zoo.lm.decode import make_decoder
from deq_zoo.lm.exporting import SegmentLength, make_export
from deq_zoo.lm.language_model import LanguageModel
from deq_zoo.lm.lexicon import Lexicon
from deq_zoo.lm.loss import last_step
from deq_zoo.lm.memory import LMOutput, Memory
from deq_zoo.lm.reading import Reading, steps_curve
from deq_zoo.lm.reference import held_out_splits, reference_splits
from deq_zoo.lm.results import SAMPLE, score_file, scores_name, stream_text
from deq_zoo.lm.settings import check_data, check_training
from deq_zoo.lm.tokens import Tokenizer, Words
from deq_zoo.lm.vocabularies import find_vocabulary
from deq_zoo.lm.writing import Sampling, Writing
from deq_zoo.predictions import Failure, OutFolder, Prediction, predict_each
from deq_zoo.record import SolverRecord
from deq_zoo.task import (
    WHOLE,
    Converted,
    Evaluation,
    Loss,
    Picture,
    Score,
    Shard,
    Split,
    Task,
    Weights,
    generator,
)
from deq_zoo.uses import BACKWARD_SOLVE, GRADIENT, JACOBIAN, NORM, SOLVE
from torchdeq import DEQConfig, jac_reg

_SHOWN = Sampling(tokens=300, temperature=0.6, top_p=0.9)  # the text in the report


@dataclass(frozen=True)
class LanguageTask(Task):
    """A text, read in several streams side by side; negative log-likelihood of the next token.

    Perplexity is `exp` of the mean negative log-likelihood in nats over all predicted tokens, with
    streams that start from empty memory. The first token of each stream and the rest that does not
    fill a column of streams are not predicted, so perplexity depends a little on `eval_batch`.

    Args:
        net: the shape of the model.
        deq: options of the equilibrium and of the Jacobian's regularisation.
        data: wikitext (words, from `data_dir`), file (any text), topics (Python's own reference),
            reference (topics and docstrings of installed packages), counting (for tests).
        data_dir: folder with the files of WikiText.
        file: the text of `data="file"`.
        pieces: byte-pair pieces of a text that is not WikiText; 0 takes bytes.
        batch: streams of training.
        length: tokens of a segment.
        memory: tokens that the model remembers in training; 0 for none.
        forget: the share of training batches that start with an empty memory, so that the model
            learns how a text begins.
        eval_batch: streams of evaluation.
        eval_memory: tokens that the model remembers in evaluation; 0 means `memory`.
        eval_limit: segments of an evaluation; 0 means all.
        consistency: weight of the squared relative length of the last unrolled step, a loss that
            makes the steps converge.
        ahead: the largest number of evaluations without a gradient before those with one, drawn at
            random for each step, so that training covers states after more steps.
        explicit: batches at first in which one evaluation of f takes the place of the solve, an
            explicit network with the weights of the attractor, and at its price; the loss has no
            `consistency` there, the Jacobian is not regularised, and `compile_f` has no effect.
        ramp: batches after the explicit ones in which the largest number of evaluations rises from
            0 to `ahead`; 0 uses `ahead` at once.
    """

    score: ClassVar[Score] = Score("perplexity", higher_is_better=False)
    former_fields: ClassVar[Mapping[str, str | None]] = {"split": None}
    shardwise: ClassVar[bool] = True  # `after_step` changes no weight

    net: LMConfig = field(default_factory=LMConfig)
    deq: DEQConfig = field(default_factory=DEQConfig)
    data: Literal["wikitext", "file", "topics", "reference", "counting"] = "wikitext"
    data_dir: str | None = None
    file: str | None = None
    pieces: int = 0
    batch: int = 16
    length: int = 64
    memory: int = 64
    forget: float = 0.0
    eval_batch: int = 16
    eval_memory: int = 0
    eval_limit: int = 0
    consistency: float = 0.0
    ahead: int = 0
    explicit: int = 0
    ramp: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, 1, "batch", "length", "eval_batch")
        counts = ("pieces", "memory", "eval_memory", "eval_limit", "ahead", "ramp", "explicit")
        check_fields(self, 0, *counts)
        check_fields(self, 0, "consistency", finite=True)
        if not 0 <= self.forget <= 1:
            raise ValueError(f"forget is a share of batches, from 0 to 1, got {self.forget}")

    @property
    def uses(self) -> frozenset[str]:
        """Return the options that have an effect: a language model decodes one state of a solve.

        The options of the backward solve need an implicit gradient. An attractor normalises no
        weights; with `mixing="published"` it has the options of the authors' solver only.
        """
        every = SOLVE | GRADIENT | JACOBIAN | {"core"}
        if self.net.mixing == "published":
            every = published.OPTIONS
        elif self.net.design != "attractor":
            every |= NORM
        return every if self.deq.implicit else every - BACKWARD_SOLVE

    @cached_property
    def corpus(self) -> Corpus:
        """Return the data with its vocabulary, or raise `DataError` if settings do not fit it."""
        check_data(self)
        if self.data == "wikitext":
            corpus = corpora.wikitext(self.data_dir)
        else:
            corpus = corpora.tokenised(self._texts(), self.pieces)
        if corpus.tokenizer.size > self.net.tokens:
            raise DataError(
                f"the text has {corpus.tokenizer.size} different tokens, the model "
                f"{self.net.tokens}: --set net.tokens={corpus.tokenizer.size}"
            )
        self._eval_streams(corpus.val)  # raises if the text is too short
        return corpus

    def _texts(self) -> Mapping[str, str]:
        """Return the three splits of a text that is not WikiText."""
        if self.data == "reference":
            return reference_splits()
        if self.data == "file":
            return corpora.split_text(corpora.read_text(self.file))
        text = corpora.topics() if self.data == "topics" else corpora.counting()
        return corpora.split_text(text)

    @property
    def train_set(self) -> Tensor:
        """Return the token ids (N,) of the training data."""
        return self.corpus.train

    @property
    def val_set(self) -> Tensor:
        """Return the token ids (N,) of the validation data."""
        return self.corpus.val

    @cached_property
    def test_set(self) -> Tensor:
        """Return the token ids (N,) of the test data."""
        ids = self._encode_split("test", self.corpus.tokenizer)
        self._eval_streams(ids)  # raises if the text is too short
        return ids

    @cached_property
    def _train_streams(self) -> Streams:
        return Streams.of(self.train_set, self.batch, self.length)

    def _eval_streams(self, ids: Tensor) -> Streams:
        return Streams.of(ids, self.eval_batch, self.length)

    def facts(self) -> dict[str, Any]:
        return {"length": self.length, "memory": self._eval_memory}

    @property
    def _eval_memory(self) -> int:
        return self.eval_memory or self.memory

    def build(self, facts: Mapping[str, Any] | None = None) -> LanguageModel:
        check_training(self)
        deq = self.deq
        if self.consistency:
            deq = deq.with_options(sup_loc=[deq.grad[0] - 1])
        return build_model(self.net, deq)

    def check_length(self, batches: int) -> None:
        if batches <= self.explicit:
            raise ZooError(
                f"explicit={self.explicit} batches of {batches} leave none for the equilibrium: "
                f"--set explicit={7 * batches // 10}, or make the run longer"
            )

    @property
    def steps_per_epoch(self) -> int:
        return len(self._train_streams)

    def train_batch(self, step: int, seed: int, shard: Shard = WHOLE) -> Segment:
        return self.make_batch(step, seed, shard, explicit=step < self.explicit)

    def make_batch(self, step: int, seed: int, shard: Shard, *, explicit: bool) -> Segment:
        """Return a batch of either kind, see `explicit` of the task."""
        k = step % len(self._train_streams)
        ids, target = self._train_streams.segment(k, shard)
        rng = generator("step", seed, step)
        weight = self._jac_weight(step)
        if weight and float(torch.rand((), generator=rng)) >= self.deq.jac_loss_freq:
            weight = 0.0
        first = k == 0 or self._forgets(step, seed)
        if explicit:
            return Segment(ids, target, first, 0.0, None, explicit=True)
        solved = max(0, step - self.explicit)
        most = min(self.ahead, solved * (self.ahead + 1) // self.ramp) if self.ramp else self.ahead
        ahead = int(torch.randint(most + 1, (), generator=rng)) if self.ahead else None
        return Segment(ids, target, first, weight, ahead, explicit=False)

    def _forgets(self, step: int, seed: int) -> bool:
        if not self.forget:
            return False
        return float(torch.rand((), generator=generator("forget", seed, step))) < self.forget

    def _jac_weight(self, step: int) -> float:
        deq = self.deq
        rises = step // deq.jac_incremental if deq.jac_incremental else 0
        return deq.jac_loss_weight + 0.1 * rises

    def batch_size(self, batch: Segment) -> int:
        return batch[0].numel()

    def loss(self, model: Any, batch: Segment, carry: Any) -> Loss:
        segment = Segment(*batch)
        memory = None if segment.first or carry is None else Memory(*carry)
        call: dict[str, Any] = {"explicit": True} if segment.explicit else {}
        if segment.ahead is not None:
            call["f_max_iter"] = segment.ahead
        out: LMOutput = model(segment.ids, memory=memory, **call)
        inner: LanguageModel = getattr(model, "module", model)  # without its wrapper
        nll = inner.nll(out.z, segment.target).mean()
        value, metrics = nll, {"nll": nll}
        if segment.jac_weight:
            value = value + segment.jac_weight * jac_reg(out.f(out.z), out.z)
        if self.consistency and not segment.explicit:
            change = last_step(out.predictions[-2], out.predictions[-1])
            value, metrics = value + self.consistency * change, {**metrics, "last_step": change}
        memory = memory or inner.empty_memory(out.u)
        new = memory.followed_by(out, self.memory)
        return Loss(value, metrics, out.stats if out.stats.nfe else None, new)

    def begin(self, model: Any) -> None:
        model.lexicon.adopt(self.corpus.tokenizer)  # from now on its checkpoints can read text

    def after_step(self, model: Any) -> None:
        model.lexicon.adopt(self.corpus.tokenizer)  # raises if a resumed run has another text

    def split_carry(self, carries: Sequence[Any], shard: Shard) -> Memory:
        """Return the memory of this process's streams, which are a block of all streams."""
        z, u = (torch.cat(parts) for parts in zip(*carries, strict=True))
        own = len(z) // shard.world
        rows = slice(shard.rank * own, (shard.rank + 1) * own)
        return Memory(z[rows], u[rows])

    def evaluate(self, model: Any, split: Split, thorough: bool = False) -> Evaluation:
        tokenizer = find_vocabulary(self, model)
        ids = self._encode_split(split, tokenizer)
        record, reading = SolverRecord(), Reading(model, self._eval_memory)
        for k, (data, target) in enumerate(self._eval_streams(ids).segments()):
            if self.eval_limit and k >= self.eval_limit:
                break
            record.add(reading(data, target).out.stats)
            if thorough and k == 0:  # a few tokens: a radius costs a hundred products
                few = model(data[:2].to(model.device), sradius_mode=True)
                record.radii += few.stats["sradius"].tolist()
        metrics = {"perplexity": reading.perplexity, "loss": reading.loss}
        if not isinstance(tokenizer, Words):
            size = len(tokenizer.decode(ids.tolist()).encode())
            metrics["bits_per_byte"] = reading.loss / log(2) * len(ids) / max(1, size)
        return Evaluation(metrics, record)

    def _encode_split(self, split: Split, tokenizer: Tokenizer) -> Tensor:
        """Return the ids (N,) of a split in the vocabulary of a model."""
        check_data(self)
        if self.data == "wikitext":
            return corpora.wikitext_split(self.data_dir, split, tokenizer)
        if self.data == "reference":
            return tokenizer.encode(held_out_splits()[split])  # without reading any docstring
        return tokenizer.encode(self._texts()[split])

    def from_authors(self, state: Weights) -> Converted:
        words = {"lexicon._extra_state": Lexicon().get_extra_state()}
        return Converted(from_authors(self.net, state) | words, self.facts())

    def to_authors(self, state: Weights) -> dict[str, Tensor]:
        return to_authors(self.net, state)

    def predict(
        self, model: Any, paths: Sequence[Path], out: OutFolder
    ) -> Iterator[Prediction | Failure]:
        if out.asked:
            out.check(scores_name(path) for path in paths)
        find_vocabulary(self, model)
        return predict_each(paths, lambda path: score_file(model, path, out))

    def exporting(self) -> SegmentLength:
        return SegmentLength()

    def export(self, model: Any, options: SegmentLength) -> Exportable:
        return make_export(model, options.length or self.length)

    def sampling(self) -> Sampling:
        return Sampling()

    def sample(self, model: Any, options: Sampling, out: OutFolder) -> Iterator[Prediction]:
        if out.asked:
            out.check([SAMPLE])
        return stream_text(self._write(model, options), out)

    def _write(self, model: LanguageModel, options: Sampling) -> Writing:
        tokenizer = find_vocabulary(self, model)
        decoder = make_decoder(model, self._eval_memory, self.length)
        return Writing(decoder, tokenizer, options)

    @torch.no_grad()
    def pictures(self, model: Any) -> list[Picture]:
        from deq_zoo.lm.pictures import first_words, loss_by_steps, page

        tokenizer = find_vocabulary(self, model)
        ids = self._encode_split("val", tokenizer)
        curve = steps_curve(model, self._eval_streams(ids), self._eval_memory)
        options = replace(_SHOWN, prompt=first_words(tokenizer.decode(ids[:100].tolist())))
        text = "\n".join(self._write(model, options))
        tolerance = self.deq.f_stop.goal if self.deq.f_stop_mode == "rel" else 0.0
        budget = self.deq.budget_in_evaluation or self.deq.grad[0]
        return [page(options.prompt, text, options.seed), loss_by_steps(curve, tolerance, budget)]
