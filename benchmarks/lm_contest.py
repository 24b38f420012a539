"""The contestants of `lm_designs` and their data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.lm_rivals import EXPLICIT, RivalTask
from deq_zoo.lm import data as corpora
from deq_zoo.lm.config import LMConfig
from deq_zoo.lm.data import Corpus
from deq_zoo.lm.presets import lm_wt2_attractor, lm_wt2_ours, lm_wt2_seq
from deq_zoo.lm.task import LanguageTask
from deq_zoo.lm.tokens import Tokenizer
from deq_zoo.optim import Optim, Trapezoid
from deq_zoo.preset import Preset

HELD_OUT = 20  # one part in so many of the training file chooses models
CONSTANT = 0.4  # the share of the time before the rate falls


@dataclass(frozen=True)
class Contest(RivalTask):
    """WikiText-2 whose validation data is the end of the training file; the test is its `valid`."""

    @cached_property
    def corpus(self) -> Corpus:
        whole = corpora.wikitext(self.data_dir)
        cut = len(whole.train) - len(whole.train) // HELD_OUT
        return Corpus(whole.train[:cut], whole.train[cut:], whole.tokenizer)

    def _encode_split(self, split: str, tokenizer: Tokenizer) -> Tensor:
        if split == "val":
            return self.corpus.val
        return corpora.wikitext_split(self.data_dir, "val", tokenizer)


def contestants(data_dir: str, millions: int, segments: int) -> dict[str, Preset]:
    """Return the four designs, of about equal size; `explicit` has the blocks of the attractor.

    The closest rivals are neighbours: `compare` makes two runs at a time, so they share a machine.

    Args:
        data_dir: folder with WikiText-2, or one above it.
        millions: of parameters, 1 or 4.
        segments: of the held-out text that an evaluation reads; 0 means all.
    """
    folder = Path(data_dir)
    folder = folder if (folder / "train.txt").exists() else folder / "wikitext2"
    attractor = lm_wt2_attractor()
    presets = {
        "explicit": attractor,
        "attractor": attractor,
        "original": lm_wt2_seq(),
        "convergent": lm_wt2_ours(),
    }
    result = {}
    for name, preset in presets.items():
        task = preset.task
        assert isinstance(task, LanguageTask)
        own: dict[str, Any] = {"data_dir": str(folder), "eval_limit": segments}
        own["net"] = task.net if millions == 1 else widened(task.net)
        if name == "explicit":
            own |= EXPLICIT
        result[name] = replace(preset, task=Contest(**{**vars(task), **own}))
    return result


def widened(net: LMConfig) -> LMConfig:
    """Return the shape of about 4 million parameters instead of 1 million."""
    inner = 3382 if net.design == "original" else 768
    return replace(net, width=192, heads=6, inner=inner)


def with_rate(optim: Optim, rate: float) -> Optim:
    """Return an optimiser with another learning rate, and with the schedule of the contest.

    Its other rates keep their ratio to this one.
    """
    changes = {"lr": rate}
    if hasattr(optim, "matrix_lr"):
        changes["matrix_lr"] = optim.matrix_lr * rate / optim.lr
    return replace(optim, schedule=Trapezoid(1 - CONSTANT), **changes)  # type: ignore[type-var]
