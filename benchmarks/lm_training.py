"""Training of language models for a processor time, and their scores."""

from __future__ import annotations

from math import exp
from pathlib import Path
from typing import Any

import torch

from benchmarks.lm_rivals import Plain
from benchmarks.rows import Row
from benchmarks.timed import TimedTraining
from deq_zoo.checkpoint import Checkpoint
from deq_zoo.lm.language_model import LanguageModel
from deq_zoo.lm.task import LanguageTask
from deq_zoo.precision import autocast
from deq_zoo.preset import Preset
from deq_zoo.task import WHOLE

FOLDER = Path(".bench") / "lm_designs"
UPDATES = (250, 500, 1000, 2000, 4000, 8000, 16000)  # at which the curve has points
_WARM = 50  # updates in which the rate rises


def train(name: str, preset: Preset, seed: int, seconds: float) -> Row:
    """Train for some processor time; return the figures of the run.

    Args:
        name: of the run's file.
        preset: task and optimiser.
        seed: of the initialisation.
        seconds: of processor time.
    """
    training = LanguageTraining(preset, seed, seconds, FOLDER / f"{name}.safetensors")
    training.run()
    figures = training.figures()
    del figures[
        "peak_mb"
    ]  # of updates before the first solve; `LanguageTraining.peak_of` says more
    return training.scores() | figures


class LanguageTraining(TimedTraining[LanguageModel]):
    """A language model whose rate follows the share of the time that is spent.

    So do its explicit batches: they end at that share of the time which is their share of the
    preset's steps.
    """

    def __init__(self, preset: Preset, seed: int, seconds: float, file: Path) -> None:
        task = preset.task
        assert isinstance(task, LanguageTask)
        self.preset, self.task = preset, task
        torch.manual_seed(seed)
        model = task.build()
        optimizer = preset.optim.make_for(model)
        task.begin(model)  # reads the data
        super().__init__(model, optimizer, seconds, file, (preset, seed, seconds))

    def update(self, share: float) -> Any:
        self.preset.optim.set_rate(self.optimizer, int(10_000 * share), 10_000)
        rise = min(1.0, (self.step + 1) / _WARM)
        for group in self.optimizer.param_groups:
            group["lr"] *= rise
        self.model.train()
        explicit = share * self.preset.steps < self.task.explicit
        batch = self.task.make_batch(self.step, self.preset.seed, WHOLE, explicit=explicit)
        with autocast(self.preset.precision, self.model.device):
            loss = self.task.loss(self.model, batch, self.carry)
        self.optimizer.zero_grad()
        loss.value.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.preset.clip)
        self.optimizer.step()
        return None if loss.carry is None else tuple(loss.carry)

    def due(self) -> bool:
        return self.step in UPDATES

    def look(self) -> dict[str, Any]:
        loss = evaluate(self.task, self.model, "val")["loss"]
        return {"loss": loss, "share": round(self.spent / self.seconds, 4)}

    def scores(self) -> Row:
        """Return parameters, and the scores on the held-out text."""
        result = evaluate(self.task, self.model, "val")
        return {
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "held_out_loss": result["loss"],
            "held_out_perplexity": exp(result["loss"]),
            "residual": result["residual"],
            "evaluations": result["evaluations"],
        }


@torch.no_grad()
def evaluate(task: LanguageTask, model: LanguageModel, split: Any) -> dict[str, Any]:
    """Return loss, residual and evaluations of a model on the held-out or the test text.

    A text that is not cut into words also has `bits_per_byte`.
    """
    model.eval()
    result = task.evaluate(model, split)
    solver = result.solver.summary()
    plain = isinstance(model, Plain)
    return {
        **{k: v for k, v in result.metrics.items() if k in ("loss", "bits_per_byte")},
        "residual": None if plain else solver["residual"],
        "evaluations": None if plain else solver["nfe"],
    }


def trained(name: str, task: LanguageTask) -> LanguageModel:
    """Return a model that `train` has saved."""
    model = task.build()
    model.load_state_dict(Checkpoint.load(FOLDER / f"{name}.safetensors").model)
    return model.eval()
