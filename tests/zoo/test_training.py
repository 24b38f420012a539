"""The training loop: updates, choosing, testing, resuming, signals."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import deq_zoo
from deq_zoo.checkpoint import Checkpoint
from deq_zoo.cli import main
from deq_zoo.errors import ZooError
from deq_zoo.evaluate import evaluate as evaluate_model
from deq_zoo.optim import SGD, Cosine
from deq_zoo.preset import Preset
from deq_zoo.run import Run
from deq_zoo.task import Score, Shard, batch_indices, steps_in_epoch
from deq_zoo.training import Result, train_changed
from tests.zoo.toy import Toy, ToyModel, toy


def unchanged(preset: Preset) -> Preset:
    return preset


def train(
    out: Path, change: Callable[[Preset], Preset] = unchanged, name: str = "toy", **options: Any
) -> Result:
    """Train a toy in a folder, without a word."""
    return train_changed(name, change, out=out, quiet=True, cpu=True, report=False, **options)


def read_weights(result: Result) -> dict[str, torch.Tensor]:
    return Checkpoint.load(result.run.last).model


class TestBatches:
    def test_an_epoch_is_a_permutation_and_shards_share_it(self) -> None:
        assert steps_in_epoch(10, 4) == 3
        assert steps_in_epoch(10, 4, drop_last=True) == 2
        epoch = torch.cat([batch_indices(10, 4, k, 0) for k in range(3)])
        assert sorted(epoch.tolist()) == list(range(10))
        again = torch.cat([batch_indices(10, 4, k, 0) for k in range(3, 6)])
        assert again.tolist() != epoch.tolist()
        halves = [batch_indices(10, 4, 1, 0, Shard(r, 2)) for r in range(2)]
        assert sorted(torch.cat(halves).tolist()) == sorted(batch_indices(10, 4, 1, 0).tolist())
        assert batch_indices(10, 4, 1, 1).tolist() != batch_indices(10, 4, 1, 0).tolist()


class TestTraining:
    def test_learns_logs_and_saves(self, tmp_path: Path) -> None:
        result = train(tmp_path / "run")
        run = result.run
        assert result.finished
        logged = [line["loss"] for line in run.lines("train")]
        assert [line["step"] for line in run.lines("train")] == [4, 8, 12, 16, 20, 24]
        assert logged[-1] < logged[0]
        evaluations = list(run.lines("eval"))
        assert [line["step"] for line in evaluations] == [8, 16, 24]
        assert result.best == min(line["metrics"]["mse"] for line in evaluations)
        solver = evaluations[-1]["solver"]
        assert sum(solver["statuses"].values()) == 32
        assert "spectral_radius" not in solver
        assert solver["trace"][-1] < solver["trace"][0]
        checkpoint = Checkpoint.load(run.last)
        assert checkpoint.step == 24
        assert checkpoint.facts == {"width": 8}

    def test_the_test_data_is_scored_once_with_the_weights_that_validation_chose(
        self, tmp_path: Path
    ) -> None:
        worst_last = {8: 0.3, 16: 0.1, 24: 0.2}  # a score that is best in the middle
        original = Toy.evaluate
        calls: list[tuple[str, bool]] = []

        def evaluate(task: Toy, model: Any, split: Any, thorough: bool = False) -> Any:
            calls.append((split, thorough))
            evaluation = original(task, model, split, thorough)
            if split == "val":
                step = 8 * len(calls)
                return replace(evaluation, metrics={"mse": worst_last[step]})
            return evaluation

        with patch.object(Toy, "evaluate", evaluate):
            result = train(tmp_path / "run")
            assert calls == [("val", False)] * 3 + [("test", True)]
            assert (result.best, result.best_step) == (0.1, 16)
            again = train(tmp_path / "run", resume=True)
        assert len(calls) == 4
        assert again.metrics == result.metrics == result.test
        (line,) = result.run.lines("test")
        assert (line["step"], line["split"], line["metrics"]) == (16, "test", result.test)
        assert 0 < line["solver"]["spectral_radius"] < 1
        model = result.model()
        best = Checkpoint.load(result.run.best)
        torch.testing.assert_close(dict(model.state_dict()), best.model, rtol=0, atol=0)
        expected = evaluate_model(toy().task, model, "test").metrics["mse"]
        assert result.test["mse"] == pytest.approx(expected, rel=1e-5)

    def test_a_score_of_nan_is_nan_again_when_a_finished_run_is_resumed(
        self, tmp_path: Path
    ) -> None:
        original = Toy.evaluate

        def nan(*args: Any) -> Any:
            return replace(original(*args), metrics={"mse": float("nan")})

        with patch.object(Toy, "evaluate", nan):
            train(tmp_path / "run")
        again = train(tmp_path / "run", resume=True)
        assert isnan(again.test["mse"])
        assert isnan(again.validation["mse"])

    def test_without_validation_data_the_last_checkpoint_counts(self, tmp_path: Path) -> None:
        with patch.object(Toy, "val_set", None):
            result = train(tmp_path / "run")
        assert not list(result.run.lines("eval"))
        assert not result.run.best.exists()
        assert result.best is None
        assert [line["step"] for line in result.run.lines("test")] == [24]
        assert result.metrics == result.test

    def test_a_model_is_built_and_begun_once_after_its_data_is_opened(self, tmp_path: Path) -> None:
        calls = []

        def note(name: str) -> Callable[..., Any]:
            original = getattr(Toy, name)

            def call(*args: Any) -> Any:
                calls.append(name)
                assert not (tmp_path / "run").exists()
                return original(*args)

            return call

        names = ["open_data", "build", "begin"]
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(patch.object(Toy, name, note(name)))
            train(tmp_path / "run")
        assert calls == names

    def test_an_interrupted_run_resumes_to_the_same_weights(self, tmp_path: Path) -> None:
        whole = train(tmp_path / "run")
        stopped = train(tmp_path / "other", max_seconds=1e-9)  # ends after the first step
        assert not stopped.finished
        assert not stopped.test
        other = stopped.run
        assert not list(other.lines("eval"))  # none was due, and the time is up
        assert not other.report.exists()
        assert Checkpoint.load(other.last).step == 1
        other.log("train", 2, {"loss": 0.0})  # written after the checkpoint, before a kill
        result = train(tmp_path / "other", resume=True)
        assert result.finished
        assert result.test == whole.test
        torch.testing.assert_close(read_weights(result), read_weights(whole), rtol=0, atol=0)
        logs = [
            [(line["step"], line["loss"], line["nfe"]) for line in run.lines("train")]
            for run in (whole.run, other)
        ]
        assert logs[0] == logs[1]

    def test_a_run_without_a_checkpoint_begins_anew(self, tmp_path: Path) -> None:
        Run.create(tmp_path / "run", "toy", toy())
        assert train(tmp_path / "run", resume=True).finished

    def test_a_resumed_run_can_be_extended(self, tmp_path: Path) -> None:
        def cosine(preset: Preset) -> Preset:
            return replace(preset, optim=replace(preset.optim, schedule=Cosine()))  # type: ignore

        out = tmp_path / "run"
        train(out, cosine)
        result = train(out, lambda preset: replace(preset, steps=36, eval_every=4), resume=True)
        assert result.finished
        assert Run.open(out).preset() == replace(cosine(toy()), steps=36, eval_every=4)
        *_, before, last = result.run.lines("train")
        rates = [0.02 * Cosine().factor(step - 1, 36) for step in (32, 36)]
        assert [before["lr"], last["lr"]] == pytest.approx(rates)  # follow the new length
        assert len(list(result.run.lines("test"))) == 2
        assert main(["train", "toy", "--out", str(out), "--cpu", "--quiet", "--no-report",
                     "--resume", "--set", "epochs=10"]) == 0  # fmt: skip
        assert Checkpoint.load(result.run.last).step == 40
        with pytest.raises(ZooError, match="has done 40 steps: choose at least as many, not 8"):
            train(out, lambda preset: replace(preset, steps=8, epochs=0), resume=True)
        with pytest.raises(ZooError, match=r"keeps its settings, except for steps.*drop optim\.lr"):
            deq_zoo.train("toy", out=out, resume=True, lr=0.5)

    def test_the_logged_loss_is_the_mean_of_its_window(self, tmp_path: Path) -> None:
        logs = []
        for every in (1, 10):
            result = train(
                tmp_path / str(every),
                lambda p, every=every: replace(p, steps=20, log_every=every, eval_every=7),  # type: ignore[misc]
            )
            logs.append([line["loss"] for line in result.run.lines("train")])
        means = [sum(logs[0][k : k + 10]) / 10 for k in (0, 10)]
        assert logs[1] == pytest.approx(means, rel=1e-5)

    def test_half_precision_keeps_the_solvers_counts(self, tmp_path: Path) -> None:
        result = train(tmp_path / "run", lambda p: replace(p, precision="bf16", log_every=1))
        assert all(line["nfe"] > 1 for line in result.run.lines("train"))

    def test_a_score_that_is_not_finite_never_wins(self) -> None:
        score = Score("accuracy")
        nan = float("nan")
        assert not score.better(nan, None)
        assert score.better(0.5, nan)
        assert score.better(0.5, None)

    def test_accumulation_and_clipping(self, tmp_path: Path) -> None:
        optim = SGD(lr=0.1, momentum=0.0)
        result = train(
            tmp_path / "run", lambda p: replace(p, accumulate=2, clip=0.1, steps=4, optim=optim)
        )
        assert Checkpoint.load(result.run.last).step == 4

    def test_no_entry_of_a_clipped_gradient_is_larger_than_allowed(self, tmp_path: Path) -> None:
        optim = SGD(lr=1.0, momentum=0.0)
        one, two = (
            read_weights(
                train(
                    tmp_path / str(steps),
                    lambda p, steps=steps: replace(  # type: ignore[misc]
                        p, steps=steps, clip_value=1e-3, optim=optim, eval_every=0
                    ),
                )
            )
            for steps in (1, 2)
        )
        largest = max(float((two[key] - one[key]).abs().max()) for key in one)
        assert largest == pytest.approx(1e-3, rel=1e-3)

    @pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
    def test_a_limit_of_time_must_be_positive(self, tmp_path: Path, seconds: float) -> None:
        with pytest.raises(ZooError, match="max_seconds must be a number above 0"):
            train(tmp_path / "run", max_seconds=seconds)
        with pytest.raises(ZooError, match="max_seconds must be a number above 0"):
            deq_zoo.fit(toy(), max_seconds=seconds)

    @pytest.mark.slow
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_signal_leaves_a_run_that_resumes_exactly(
        self, number: signal.Signals, workers: int, tmp_path: Path
    ) -> None:
        def change(preset: Preset) -> Preset:
            return replace(preset, steps=400, save_every=7, eval_every=400, workers=workers)

        whole = train(tmp_path / "whole", change)
        out = tmp_path / "killed"
        code = (
            "from tests.zoo import toy; import deq_zoo, sys;"
            f"r = deq_zoo.train('toy', out={str(out)!r}, quiet=True, cpu=True, report=False,"
            f"steps=400, save_every=7, eval_every=400, workers={workers});"
            "sys.exit(128 + r.interrupted)"
        )
        process = subprocess.Popen([sys.executable, "-c", code])
        while not (out / "log.jsonl").exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait() == (-9 if number == signal.SIGKILL else 128 + number)
        assert 0 <= Checkpoint.load(out / "last.safetensors").step < 400
        killed = train(out, resume=True)
        torch.testing.assert_close(read_weights(killed), read_weights(whole), rtol=0, atol=0)


class TestPython:
    def test_settings_are_those_of_the_command_line(self, tmp_path: Path) -> None:
        settings: dict[str, Any] = {"lr": 0.01, "epochs": 1, "task.batch": 32, "grad": [2],
                                    "f_solver": "anderson", "data_dir": "here"}  # fmt: skip
        result = deq_zoo.train(
            "toy", out=tmp_path / "python", quiet=True, cpu=True, report=False, **settings
        )
        flags = ["--set", "lr=0.01", "--set", "epochs=1", "--set", "task.batch=32", "--grad", "2",
                 "--f_solver", "anderson", "--data-dir", "here"]  # fmt: skip
        common = ["--out", str(tmp_path / "cli"), "--quiet", "--cpu", "--no-report"]
        assert main(["train", "toy", *common, *flags]) == 0
        assert result.run.preset() == Run.open(tmp_path / "cli").preset()
        assert result.steps == 2

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"lrr": 1}, "unknown setting 'lrr'"),
            ({"lr": "fast"}, "optim.lr takes float"),
            ({"f_solver": "andersen"}, "did you mean 'anderson'"),
            ({"tau": 3}, "tau must lie in"),
            ({"jac_loss_weight": 0.5}, "jac_loss_weight would have no effect"),
            ({"width": -1}, "cannot be built"),
            ({"resume": True, "force": True}, "choose one"),
        ],
    )
    def test_mistakes_are_errors_before_anything_is_written(
        self, tmp_path: Path, settings: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ZooError, match=message):
            deq_zoo.train("toy", out=tmp_path / "run", quiet=True, cpu=True, **settings)
        assert not (tmp_path / "run").exists()

    def test_a_fit_in_memory_takes_the_steps_of_a_run(self, tmp_path: Path) -> None:
        seen: list[tuple[int, float]] = []
        before = torch.get_rng_state()
        model = deq_zoo.fit(toy(), progress=lambda step, loss: seen.append((step, loss)))
        assert torch.equal(torch.get_rng_state(), before)
        assert not model.training
        assert (model.facts, model.preset) == ({"width": 8}, toy())
        run = train(tmp_path / "run", lambda preset: replace(preset, log_every=1))
        assert seen == [(line["step"], line["loss"]) for line in run.run.lines("train")]
        torch.testing.assert_close(dict(model.state_dict()), read_weights(run), rtol=0, atol=0)

    def test_a_fit_goes_on_with_a_given_model_until_time_is_up(self) -> None:
        model = ToyModel(8, Toy().deq)
        weights = model.f.weight.clone()
        steps: list[int] = []
        same = deq_zoo.fit(
            toy(), model=model, max_seconds=1e-9, progress=lambda step, loss: steps.append(step)
        )
        assert same is model
        assert steps == [1]
        assert not torch.equal(model.f.weight, weights)
