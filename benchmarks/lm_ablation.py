"""What does each part of the attractor's training bring? The rows of `lm_designs --only ablate`.

`one step` and `implicit gradient` have no residual loss, so their neighbour is `no residual loss`.
Muon updates the matrices of the backbone with each of three rates; all else is as in its neighbour.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.lm_rivals import FromZeros
from benchmarks.lm_training import evaluate, train, trained
from benchmarks.rows import Row
from deq_zoo.lm.task import LanguageTask
from deq_zoo.muon import Muon
from deq_zoo.optim import Adam
from deq_zoo.preset import Preset

MUON_RATES = (5e-3, 1e-2, 2e-2)


def variants(attractor: Preset, explicit: Preset) -> dict[str, Preset]:
    """Return the presets of all rows: the attractor with one part of its training changed.

    The explicit transformer is among them, for comparison.

    Args:
        attractor: with its best learning rate.
        explicit: the same of the explicit transformer.
    """
    task = attractor.task
    assert isinstance(task, LanguageTask)
    deq, random_core = task.deq, replace(task.net, core_start="random")
    implicit = {"ift": True, "f_max_iter": 12, "grad": [1], "b_solver": "gmres", "b_tol": 1e-2}
    own: dict[str, dict[str, Any]] = {
        "whole": {},
        "explicit to the end": {"explicit": attractor.steps},
        "never explicit": {"explicit": 0},
        "no residual loss": {"consistency": 0.0},
        "one step": {"deq": deq.with_options(grad=[1]), "ahead": 2, "consistency": 0.0},
        "implicit gradient": {"deq": deq.with_options(**implicit), "consistency": 0.0},
        "random gated blocks at first": {"net": random_core},
        "start at zeros": {"rival": FromZeros},
        "published start": {"net": replace(random_core, input_rms=0.0, gate_start=0.75)},
        "compiled f": {"deq": deq.with_options(compile_f=True)},
    }
    return {
        "explicit": explicit,
        **{name: replace(attractor, task=replace(task, **part)) for name, part in own.items()},
        "mixed precision": replace(attractor, precision="bf16"),
        **{f"Muon {rate:g}": with_muon(attractor, rate) for rate in MUON_RATES},
        **{f"Muon everywhere {rate:g}": with_muon(attractor, rate, True) for rate in MUON_RATES},
        **{f"explicit, Muon {rate:g}": with_muon(explicit, rate) for rate in MUON_RATES},
    }


def with_muon(preset: Preset, rate: float, everywhere: bool = False) -> Preset:
    """Return a preset whose backbone has its matrices changed by Muon, all other weights as before.

    Args:
        preset: with the optimiser `Adam`.
        rate: of Muon.
        everywhere: in the gated blocks, too.
    """
    adam = preset.optim
    assert isinstance(adam, Adam)
    muon = Muon(
        lr=adam.lr,
        matrix_lr=rate,
        core_factor=1.0,
        betas=adam.betas,
        eps=adam.eps,
        weight_decay=adam.weight_decay,
        schedule=adam.schedule,
        **({"core_muon": True} if everywhere else {"core_decay": adam.weight_decay}),
    )
    return replace(preset, optim=muon)


def train_part(run: str, preset: Preset, seconds: float) -> Row:
    """Train; score an attractor after one evaluation, too, which it was trained for at first."""
    row = train(run, preset, 0, seconds)
    task = preset.task
    assert isinstance(task, LanguageTask)
    if row["residual"] is not None:
        model = trained(run, task)
        model.deq.eval_f_max_iter = 1
        row["loss after one evaluation"] = evaluate(task, model, "val")["loss"]
    return row
