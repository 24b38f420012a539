"""How good are cheap gradients of a trained attractor? One batch, against the exact gradient."""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.lm_training import trained
from benchmarks.rows import Row
from deq_zoo.lm.attractor.model import Attractor
from deq_zoo.lm.data import Segment
from deq_zoo.lm.memory import Memory
from deq_zoo.lm.task import LanguageTask

_ROUNDS = 7
_EXACT: dict[str, Any] = {
    "ift": True, "f_max_iter": 200, "f_tol": 1e-9, "b_solver": "gmres", "b_max_iter": 200,
    "b_tol": 1e-9, "on_failure": "raise",
}  # fmt: skip

#: Options of the equilibrium in training, by name.
GRADIENTS: dict[str, dict[str, Any]] = {
    "1 step, none before": {"f_max_iter": 0, "grad": [1]},
    "1 step after 1": {"f_max_iter": 1, "grad": [1]},
    "1 step after 2": {"f_max_iter": 2, "grad": [1]},
    "2 steps, none before": {"f_max_iter": 0, "grad": [2]},
    "2 steps after 2": {"f_max_iter": 2, "grad": [2]},
    "3 steps after 2": {"f_max_iter": 2, "grad": [3]},
    "implicit, GMRES to 1e-2": {
        "ift": True, "f_max_iter": 12, "b_solver": "gmres", "b_max_iter": 20, "b_tol": 1e-2,
    },
}  # fmt: skip


def measure(run: str, task: LanguageTask, name: str) -> Row:
    """Return the error of a gradient of one trained attractor, and its time.

    Args:
        run: name of the attractor's file.
        task: that it was trained for.
        name: of the gradient.
    """
    exact = _gradient(run, task, _EXACT, torch.float64)
    cheap = _gradient(run, task, GRADIENTS[name], torch.float64)
    core = {key: g for key, g in exact.items() if key.startswith("core.")}
    return {
        "error": _error(cheap, exact),
        "error_of_gated_block": _error(cheap, core),
        "cosine_of_gated_block": _cosine(cheap, core),
        "ms": 1e3 * _seconds(run, task, GRADIENTS[name]),
    }


def _gradient(
    run: str, task: LanguageTask, options: dict[str, Any], dtype: torch.dtype
) -> dict[str, Tensor]:
    model, batch, memory = _open(run, task, options, dtype)
    _backward(model, batch, memory)
    return {name: p.grad.flatten() for name, p in model.named_parameters() if p.grad is not None}


def _open(
    run: str, task: LanguageTask, options: dict[str, Any], dtype: torch.dtype
) -> tuple[Attractor, Segment, Memory]:
    """Return the model with the gradient of `options`, the second batch, and its memory."""
    deq = task.deq.with_options(**options)
    model = trained(run, replace(task, deq=deq, consistency=0.0))
    assert isinstance(model, Attractor)
    model.train().to(dtype)
    first, second = (task.train_batch(step, 0) for step in (0, 1))
    with torch.no_grad():
        out = model(first.ids, f_max_iter=20)
    memory = model.empty_memory(out.u).followed_by(out, task.memory)
    return model, second, memory


def _backward(model: Attractor, batch: Segment, memory: Memory) -> None:
    model.nll(model(batch.ids, memory=memory).z, batch.target).mean().backward()


def _seconds(run: str, task: LanguageTask, options: dict[str, Any]) -> float:
    """Return the processor time of a loss and its gradient, in the precision of training."""
    model, batch, memory = _open(run, task, options, torch.float32)
    times = []
    for _ in range(_ROUNDS + 1):
        model.zero_grad()
        began = time.process_time()
        _backward(model, batch, memory)
        times.append(time.process_time() - began)
    return median(times[1:])  # the first is not warm


def _joined(gradient: dict[str, Tensor], names: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradient[name] for name in names])


def _error(cheap: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Return the relative error of those weights that `exact` has."""
    g = _joined(exact, exact)
    return float((_joined(cheap, exact) - g).norm() / g.norm())


def _cosine(cheap: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    return float(torch.cosine_similarity(_joined(cheap, exact), _joined(exact, exact), dim=0))
