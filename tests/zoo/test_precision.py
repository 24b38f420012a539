"""The precision of a run: tolerances it can meet, scaled losses in fp16, float64 throughout."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import deq_zoo
from deq_zoo.checkpoint import Checkpoint
from deq_zoo.cli import main
from deq_zoo.fitting import fit
from deq_zoo.precision import reachable_tolerances
from deq_zoo.preset import Preset, find_preset
from deq_zoo.run import Run
from deq_zoo.settings import change_settings
from deq_zoo.training import Result, train_changed
from deq_zoo.tree import tensors
from deq_zoo.uses import GRADIENT, SOLVE
from tests.contracts.families import NAMES
from tests.zoo.toy import toy
from torchdeq import DEQConfig

USES = SOLVE | GRADIENT


def train(
    out: Path, resume: bool = False, max_seconds: float | None = None, **settings: Any
) -> Result:
    def change(preset: Preset) -> Preset:
        return change_settings(preset, settings)

    return train_changed("toy", change, out=out, resume=resume, max_seconds=max_seconds, quiet=True,
                         cpu=True, report=False)  # fmt: skip


@pytest.mark.parametrize(
    ("options", "raised"),
    [
        ({"f_stop_mode": "rel"}, {"f_tol": 1e-2}),
        ({"f_stop_mode": "rel", "f_tol": 0.1}, {}),
        ({}, {"f_tol": 0.0, "f_rtol": 1e-2, "f_atol": 1e-3}),
        ({"f_tol": 0.0}, {}),
        ({"f_rtol": 1e-4}, {"f_rtol": 1e-2}),
        ({"f_rtol": 0.1, "f_atol": 1e-4}, {}),
        ({"f_tol": 0.0, "ift": True}, {"b_tol": 1e-2}),
        ({"f_tol": 0.0, "ift": True, "b_tol": 0.0}, {}),
        ({"f_tol": 0.0, "ift": True, "b_stop_mode": "rel", "b_tol": 1e-3}, {"b_tol": 1e-2}),
    ],
)
def test_tolerances_rise_to_what_a_precision_reaches(
    options: dict[str, Any], raised: dict[str, Any]
) -> None:
    deq = DEQConfig(**options)
    assert reachable_tolerances(deq, "bf16", USES) == raised
    deq.with_options(**raised)  # a valid configuration
    assert reachable_tolerances(deq, "no", USES) == {}
    assert reachable_tolerances(deq, "float64", USES) == {}
    assert reachable_tolerances(deq.with_options(**raised), "bf16", USES) in (
        {},
        {"f_rtol": 1e-2} if "f_rtol" in raised else {},
    )


def test_options_of_the_user_and_options_without_effect_stay() -> None:
    deq = DEQConfig(ift=True, f_stop_mode="rel")
    assert reachable_tolerances(deq, "fp16", USES, kept={"f_tol"}) == {"b_tol": 1e-3}
    assert reachable_tolerances(deq, "fp16", SOLVE) == {}  # f_tol is 1e-3 already
    assert "b_tol" not in reachable_tolerances(deq, "bf16", SOLVE)


def test_another_precision_brings_its_tolerances_with_one_note(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "deq_zoo"):
        changed = change_settings(toy(), {"precision": "bf16", "ift": True})
    deq = changed.task.deq
    assert (deq.f_tol, deq.f_rtol, deq.f_atol, deq.b_tol) == (0.0, 1e-2, 1e-4, 1e-2)
    (record,) = caplog.records
    assert "precision bf16: solves reach a relative residual of 0.01" in record.getMessage()
    assert "f_rtol=0.01, f_atol=0.0001, b_tol=0.01" in record.getMessage()
    caplog.clear()
    own = change_settings(toy(), {"precision": "bf16", "f_tol": 1e-5})
    assert own.task.deq.f_tol == 1e-5
    assert change_settings(toy(), {"precision": "bf16", "task.deq.f_tol": 1e-5}) == own
    assert not caplog.records
    assert change_settings(own, {"precision": "bf16"}) == own  # it is the precision already


def test_info_says_what_a_precision_reaches(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["info", "mdeq-smoke", "--set", "precision=fp16"]
    assert main(words) == 0
    assert "precision fp16: solves reach a relative residual of 0.001" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    assert "f_rtol=0.001" in json.loads(capsys.readouterr().out)["precision"]
    assert main(["info", "mdeq-smoke"]) == 0
    assert "solves reach" not in capsys.readouterr().out


class TestScaledLosses:
    def test_a_run_on_a_cpu_scales_its_losses_and_resumes_bit_for_bit(self, tmp_path: Path) -> None:
        whole = train(tmp_path / "whole", precision="fp16", steps=12)
        scaler = Checkpoint.load(whole.run.last).notes["scaler"]
        assert scaler is not None
        assert scaler["_growth_tracker"] > 0  # steps without infinities since the last change
        assert train(tmp_path / "half", max_seconds=1e-9, precision="fp16", steps=12).step == 1
        train(tmp_path / "half", resume=True)
        a, b = (Checkpoint.load(Run(tmp_path / name).last) for name in ("whole", "half"))
        assert a.notes["scaler"] == b.notes["scaler"]
        torch.testing.assert_close(a.model, b.model, rtol=0, atol=0)
        losses = [
            [line["loss"] for line in Run(tmp_path / name).lines("train")]
            for name in ("whole", "half")
        ]
        assert losses[0] == losses[1]

    def test_a_run_learns_what_a_run_in_single_precision_learns(self, tmp_path: Path) -> None:
        runs = [train(tmp_path / p, precision=p, clip=1.0, clip_value=0.5) for p in ("no", "fp16")]
        scores = [run.test["mse"] for run in runs]
        assert scores[1] == pytest.approx(scores[0], rel=0.05)

    def test_fit_scales_too(self) -> None:
        preset = replace(toy(), steps=60, clip=1.0, clip_value=0.5)
        ends = []
        for changed in (preset, replace(preset, precision="fp16")):
            losses = list[float]()

            def keep(step: int, loss: float, kept: list[float] = losses) -> None:
                kept.append(loss)

            fit(changed, progress=keep)
            ends.append(sum(losses[-8:]) / 8)
        assert ends[1] == pytest.approx(ends[0], rel=0.15)


class TestDoublePrecision:
    def test_weights_states_and_predictions_of_a_run_are_double(self, tmp_path: Path) -> None:
        run = train(tmp_path / "run", precision="float64", steps=6).run
        checkpoint = Checkpoint.load(run.last)
        kinds = {t.dtype for t in tensors([checkpoint.model, checkpoint.carry])}
        assert kinds == {torch.float64}
        model = deq_zoo.load(run.path)
        assert model.dtype == torch.float64
        out = model(model.place(torch.randn(4, 8)))
        assert out.state.dtype == out.prediction.dtype == torch.float64

    @pytest.mark.slow
    @pytest.mark.parametrize("name", NAMES)
    def test_every_family_trains_evaluates_and_reports_in_double_precision(
        self, name: str, tmp_path: Path
    ) -> None:
        words = ["train", f"{name}-smoke", "--cpu", "--quiet", "--set", "precision=float64"]
        assert main([*words, "--out", str(tmp_path / "run")]) == 0
        run = Run.open(tmp_path / "run")
        model = deq_zoo.load(run.path)
        assert {p.dtype for p in model.parameters()} == {torch.float64}
        single = find_preset(f"{name}-smoke")
        losses = [line["loss"] for line in run.lines("train")]
        assert main([*words[:-1], "precision=no", "--out", str(tmp_path / "single")]) == 0
        others = [line["loss"] for line in Run.open(tmp_path / "single").lines("train")]
        assert losses[0] == pytest.approx(others[0], rel=1e-3)
        assert losses != others
        assert single.precision == "no"

    @pytest.mark.slow
    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    @pytest.mark.parametrize("name", NAMES)
    def test_every_family_trains_in_half_precision(
        self, name: str, precision: str, tmp_path: Path
    ) -> None:
        words = ["train", f"{name}-smoke", "--cpu", "--quiet", "--no-report"]
        out = str(tmp_path / "run")
        assert main([*words, "--set", f"precision={precision}", "--out", out]) == 0
        assert main(["evaluate", out, "--cpu"]) == 0
