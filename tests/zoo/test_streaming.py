"""Evaluation through a stream gives the figures of evaluation in fixed batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from deq_zoo.errors import ZooError
from deq_zoo.evaluate import evaluate
from deq_zoo.family import find_family
from deq_zoo.lm.passages import score_passages
from deq_zoo.preset import find_preset, load_presets

for family in ("mdeq", "lm"):
    load_presets(find_family(family))


def mdeq(**options: Any) -> Any:
    """Return the task of the smoke preset with other options of its DEQ."""
    task: Any = find_preset("mdeq-smoke").task
    deq = {"f_max_iter": 12, "f_tol": 0.5, "f_stop_mode": "rel", "f_solver": "anderson"}
    return replace(task, deq=task.deq.with_options(**(deq | options)), eval_batch=25)


@pytest.mark.parametrize("solver", ["fixed_point_iter", "anderson", "broyden"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_mdeq_gets_the_same_figures_through_slots(solver: str, channels_last: bool) -> None:
    damping = {} if solver == "broyden" else {"tau": 0.5}
    task = replace(mdeq(f_solver=solver, f_solver_kwargs=damping), channels_last=channels_last)
    model = task.build()
    fixed = evaluate(task, model, "test", thorough=True)
    streamed = evaluate(replace(task, eval_slots=7), model, "test", thorough=True)
    assert streamed.metrics["accuracy"] == fixed.metrics["accuracy"]
    assert streamed.metrics["loss"] == pytest.approx(fixed.metrics["loss"], abs=1e-4)
    assert fixed.solver.statuses["CONVERGED"] >= 32  # untrained, and with a loose tolerance
    one, other = fixed.solver.summary(), streamed.solver.summary()
    assert other["statuses"] == one["statuses"]
    assert other["nfe"] == pytest.approx(one["nfe"], abs=1.0)
    assert other["residual"] == pytest.approx(one["residual"], rel=0.3)
    assert other["spectral_radius"] == pytest.approx(one["spectral_radius"], rel=1e-4)


def test_batches_of_one_image_are_enough() -> None:
    task = replace(mdeq(), eval_batch=1, eval_slots=3)
    assert evaluate(task, task.build(), "test").solver.samples == 64


def test_a_solver_or_a_budget_without_samples_that_leave_is_refused() -> None:
    for options, message in (
        ({"f_solver": "simple_fixed_point_iter"}, "f_solver"),
        ({"f_max_iter": 0, "eval_factor": 1.0}, "unrolls"),
    ):
        task = replace(mdeq(**options), eval_slots=4)
        with pytest.raises(ZooError, match=message):
            evaluate(task, task.build(), "test")


@pytest.mark.parametrize(("preset", "tol"), [("lm-smoke", 4e-3), ("lm-quick", 0.1)])
def test_passages_get_the_same_probabilities_through_slots(preset: str, tol: float) -> None:
    task: Any = find_preset(preset).task
    task = replace(task, deq=task.deq.with_options(f_tol=tol, eval_f_max_iter=12))
    model = task.build({}) if preset == "lm-quick" else task.build()
    model.eval()
    ids = torch.randint(model.config.tokens, (11, 17))
    alone, fixed = score_passages(model, ids, batch=4)
    together, streamed = score_passages(model, ids, slots=3, batch=4)
    assert together.shape == (11, 16)
    torch.testing.assert_close(together, alone, atol=2e-3, rtol=0)
    assert torch.equal(streamed.status, fixed.status)
