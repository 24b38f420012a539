"""The contestants of `lm_designs`, their data, and one training run for a given time."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.lm_rivals import Plain
from deq_zoo.lm import data as corpora
from deq_zoo.lm.config import LMConfig
from deq_zoo.lm.data import Corpus
from deq_zoo.lm.language_model import LanguageModel
from deq_zoo.lm.presets import lm_wt2_attractor, lm_wt2_ours, lm_wt2_seq
from deq_zoo.lm.task import LanguageTask
from deq_zoo.lm.tokens import Tokenizer
from deq_zoo.optim import Optim, Trapezoid
from deq_zoo.preset import Preset

FOLDER = Path(".bench") / "lm_designs"
HELD_OUT = 20  # one part in so many of the training file chooses models
UPDATES = (250, 500, 1000, 2000, 4000, 8000, 16000)  # at which all designs are compared
Row = dict[str, Any]


@dataclass(frozen=True)
class Contest(LanguageTask):
    """WikiText-2 whose validation data is the end of the training file; the test is its `valid`."""

    plain: bool = False

    def build(self, facts: Mapping[str, Any] | None = None) -> LanguageModel:
        return Plain(self.net, self.deq) if self.plain else super().build(facts)

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
    """Return the four designs, of about equal size.

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
        "original": lm_wt2_seq(),
        "convergent": lm_wt2_ours(),
        "attractor": attractor,
    }
    result = {}
    for name, preset in presets.items():
        task = preset.task
        assert isinstance(task, LanguageTask)
        own: dict[str, Any] = {"data_dir": str(folder), "eval_limit": segments}
        own["net"] = task.net if millions == 1 else widened(task.net)
        if name == "explicit":
            own |= {"plain": True, "ahead": 0, "consistency": 0.0}
        result[name] = replace(preset, task=Contest(**{**vars(task), **own}))
    return result


def widened(net: LMConfig) -> LMConfig:
    """Return the shape of about 4 million parameters instead of 1 million."""
    inner = 3382 if net.design == "original" else 768
    return replace(net, width=192, heads=6, inner=inner)


def with_rate(optim: Optim, rate: float) -> Optim:
    """Return an optimiser with another learning rate; other rates of it keep their ratio."""
    changes = {"lr": rate}
    if hasattr(optim, "matrix_lr"):
        changes["matrix_lr"] = optim.matrix_lr * rate / optim.lr
    return replace(optim, schedule=Trapezoid(0.6), **changes)  # type: ignore[type-var]


@dataclass
class Clock:
    """Processor time of training alone; evaluations in between do not count."""

    spent: float = 0.0
    _began: float = 0.0

    def start(self) -> None:
        self._began = time.process_time()

    def stop(self) -> float:
        """Return the seconds since the start, and add them."""
        seconds = time.process_time() - self._began
        self.spent += seconds
        return seconds


def train(name: str, preset: Preset, seed: int, seconds: float) -> Row:
    """Train for some processor time, or go on where a killed run has stopped; save the weights.

    Args:
        name: of the run's files.
        preset: task and optimiser.
        seed: of the initialisation.
        seconds: of processor time.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    task = preset.task
    assert isinstance(task, LanguageTask)
    model, carry, step, clock = task.build(), None, 0, Clock()
    optimizer = preset.optim.make_for(model)
    task.begin(model)  # reads the data
    before, times, curve = _peak_mb(), list[float](), dict[str, float]()
    saved = FOLDER / f"{name}.checkpoint"
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        carry, step, clock.spent = state["carry"], state["step"], state["spent"]
        times, curve = state["times"], state["curve"]
    saved_at = clock.spent
    while clock.spent < seconds:
        clock.start()
        carry = _update(preset, model, optimizer, step, clock.spent / seconds, carry)
        times.append(clock.stop())
        step += 1
        if step in UPDATES:
            curve[str(step)] = evaluate(task, model, "val")["loss"]
        if clock.spent - saved_at > 60:
            saved_at = clock.spent
            _save(saved, model, optimizer, carry, step, clock.spent, times, curve)
    save_file(model.state_dict(), FOLDER / f"{name}.safetensors")
    saved.unlink(missing_ok=True)
    result = evaluate(task, model, "val")
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "updates": step,
        "held_out_loss": result["loss"],
        "held_out_perplexity": exp(result["loss"]),
        "residual": result["residual"],
        "evaluations": result["evaluations"],
        "ms_per_step": 1e3 * median(times),
        "peak_mb": _peak_mb() - before,
        "held_out_loss_by_updates": curve,
    }


def _update(
    preset: Preset, model: LanguageModel, optimizer: Any, step: int, share: float, carry: Any
) -> Any:
    """Make one update; return what the next one starts from."""
    task = preset.task
    preset.optim.set_rate(optimizer, int(10_000 * share), 10_000)
    rise = min(1.0, (step + 1) / 50)
    for group in optimizer.param_groups:
        group["lr"] *= rise
    model.train()
    loss = task.loss(model, task.train_batch(step, preset.seed), carry)
    optimizer.zero_grad()
    loss.value.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), preset.clip)
    optimizer.step()
    return None if loss.carry is None else tuple(loss.carry)


@torch.no_grad()
def evaluate(task: LanguageTask, model: LanguageModel, split: Any) -> dict[str, Any]:
    """Return loss, residual and evaluations of a model on the held-out or the test text."""
    model.eval()
    result = task.evaluate(model, split)
    solver = result.solver.summary()
    plain = isinstance(model, Plain)
    return {
        "loss": result.metrics["loss"],
        "residual": None if plain else solver["residual"],
        "evaluations": None if plain else solver["nfe"],
    }


def trained(name: str, task: LanguageTask) -> LanguageModel:
    """Return a model that `train` has saved."""
    model = task.build()
    model.load_state_dict(load_file(FOLDER / f"{name}.safetensors"))
    return model.eval()


def _save(
    path: Path, model: LanguageModel, optimizer: Any, carry: Any, step: int, spent: float,
    times: list[float], curve: dict[str, float],
) -> None:  # fmt: skip
    """Write under another name first: a killed run leaves the file whole."""
    part = path.with_suffix(".part")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "carry": carry}
    torch.save(state | {"step": step, "spent": spent, "times": times, "curve": curve}, part)
    os.replace(part, path)


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
