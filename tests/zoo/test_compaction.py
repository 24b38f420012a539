"""Compaction in evaluation: switched on by counting, and without effect on results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from deq_zoo import compaction
from deq_zoo.building import try_to_build
from deq_zoo.compaction import Compaction
from deq_zoo.evaluate import evaluate
from deq_zoo.lm.config import LMConfig
from deq_zoo.preset import find_preset
from tests.zoo.toy import ToyModel
from torchdeq import DEQConfig, solver

#: Presets whose samples finish one by one, with a tolerance and budget at which many do.
FINISHING: dict[str, dict[str, Any]] = {
    "mdeq-smoke": {"f_solver": "anderson", "f_max_iter": 40, "f_tol": 0.4, "f_stop_mode": "rel"},
    "lm-smoke": {"f_solver": "anderson", "f_max_iter": 40, "f_tol": 1e-4, "f_stop_mode": "rel"},
    "inr-smoke": {"f_solver": "anderson", "f_max_iter": 40, "f_tol": 1e-5, "f_stop_mode": "rel"},
}
TASKS: dict[str, dict[str, Any]] = {
    "mdeq-smoke": {"eval_batch": 16},
    "lm-smoke": {
        "net": LMConfig(design="convergent", width=16, heads=2, inner=32, blocks=1, init="scaled"),
        "eval_batch": 8, "length": 8, "eval_limit": 4,
    },
    "inr-smoke": {"points_at_once": 16},
}  # fmt: skip


def model_and_task(name: str) -> tuple[Any, Any]:
    preset = find_preset(name).with_deq(**FINISHING[name])
    preset = replace(preset, task=replace(preset.task, **TASKS[name]))  # type: ignore[type-var]
    torch.manual_seed(0)
    model = try_to_build(preset)
    preset.task.begin(model)
    return model.eval(), preset.task


@pytest.mark.parametrize("name", list(FINISHING))
def test_results_do_not_depend_on_compaction(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, task = model_and_task(name)
    evaluations, rows = [], list[int]()
    keep = solver.base.FixedPointFn.keep

    def counted(self: Any, kept: Any) -> None:
        rows.append(len(kept))
        keep(self, kept)

    monkeypatch.setattr(solver.base.FixedPointFn, "keep", counted)
    for least in (10**18, 0):
        monkeypatch.setattr(compaction, "LEAST_OPERATIONS", least)
        evaluations.append(evaluate(task, model, "test", thorough=False))
        assert bool(rows) == (least == 0)  # samples have left the batch
    whole, compact = evaluations
    assert compact.metrics == pytest.approx(whole.metrics, rel=1e-4)
    assert compact.solver.statuses == whole.solver.statuses
    assert compact.solver.nfe == whole.solver.nfe


class TestTheRule:
    def test_cheap_maps_keep_their_batch(self) -> None:
        solve = Compaction(ToyModel(8, DEQConfig(f_tol=1e-4)).eval())
        solve(torch.randn(64, 8))
        assert solve.on is False

    def test_costly_maps_compact_from_the_second_batch_on(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, _ = model_and_task("mdeq-smoke")
        monkeypatch.setattr(compaction, "LEAST_OPERATIONS", 1000)
        solve, calls = Compaction(model), list[bool]()
        forward = type(model).forward

        def spy(self: Any, *x: Any, **call: Any) -> Any:
            calls.append(call.get("compact", False))
            return forward(self, *x, **call)

        monkeypatch.setattr(type(model), "forward", spy)
        for _ in range(3):
            solve(torch.randn(16, 1, 8, 8))
        assert calls == [False, True, True]
        few = Compaction(model)
        few(torch.randn(4, 1, 8, 8))
        assert few.on is False

    @pytest.mark.parametrize("options", [{"f_tol": 0.0, "f_stop_mode": "abs"}, {"coupled": True}])
    def test_nothing_leaves_without_a_tolerance_or_with_coupled_samples(
        self, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compaction, "LEAST_OPERATIONS", 0)
        preset = find_preset("mdeq-smoke").with_deq(**{**FINISHING["mdeq-smoke"], **options})
        model = try_to_build(preset)
        solve = Compaction(model.eval())
        with torch.no_grad():
            solve(torch.randn(16, 1, 8, 8))
        assert solve.on is False
