"""The training loop: batches, updates, resuming, signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deq_zoo.checkpoint import Checkpoint
from deq_zoo.errors import ZooError
from deq_zoo.optim import SGD
from deq_zoo.run import Run
from deq_zoo.task import Score, Shard, batch_indices, steps_in_epoch
from deq_zoo.training import train
from tests.zoo.toy import toy


def read_weights(run: Run) -> dict[str, torch.Tensor]:
    return Checkpoint.load(run.last).model


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "run", "toy", toy())


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
    def test_learns_logs_and_saves(self, run: Run) -> None:
        result = train(run, toy(), quiet=True, cpu=True)
        assert result.finished
        logged = [line["loss"] for line in run.lines("train")]
        assert [line["step"] for line in run.lines("train")] == [4, 8, 12, 16, 20, 24]
        assert logged[-1] < logged[0]
        evaluations = list(run.lines("eval"))
        assert [line["step"] for line in evaluations] == [8, 16, 24]
        assert result.best == min(line["metrics"]["mse"] for line in evaluations)
        solver = evaluations[-1]["solver"]
        assert sum(solver["statuses"].values()) == 32
        assert 0 < solver["spectral_radius"] < 1
        assert solver["trace"][-1] < solver["trace"][0]
        assert Checkpoint.load(run.last).step == 24

    def test_an_interrupted_run_resumes_to_the_same_weights(self, run: Run, tmp_path: Path) -> None:
        train(run, toy(), quiet=True, cpu=True)
        other = Run.create(tmp_path / "other", "toy", toy())
        train(other, toy(), quiet=True, cpu=True, max_seconds=0)  # ends after the first step
        assert Checkpoint.load(other.last).step == 1
        other.log("train", 2, {"loss": 0.0})  # written after the checkpoint, before a kill
        result = train(other, toy(), quiet=True, cpu=True, resume=True)
        assert result.finished
        torch.testing.assert_close(read_weights(other), read_weights(run), rtol=0, atol=0)
        assert [line["step"] for line in other.lines("train")] == [4, 8, 12, 16, 20, 24]

    def test_a_run_without_a_checkpoint_begins_anew(self, run: Run) -> None:
        result = train(run, toy(), quiet=True, cpu=True, resume=True)
        assert result.finished

    def test_a_finished_run_says_what_it_reached(self, run: Run) -> None:
        first = train(run, toy(), quiet=True, cpu=True)
        again = train(run, toy(), quiet=True, cpu=True, resume=True)
        assert again.finished
        assert again.metrics == first.metrics

    def test_the_logged_loss_is_the_mean_of_its_window(self, tmp_path: Path) -> None:
        fine = replace(toy(), log_every=1)
        coarse = replace(toy(), log_every=10, steps=20, eval_every=7)
        logs = []
        for name, preset in (("fine", fine), ("coarse", coarse)):
            run = Run.create(tmp_path / name, "toy", replace(preset, steps=20))
            train(run, replace(preset, steps=20), quiet=True, cpu=True)
            logs.append([line["loss"] for line in run.lines("train")])
        means = [sum(logs[0][k : k + 10]) / 10 for k in (0, 10)]
        assert logs[1] == pytest.approx(means, rel=1e-5)

    def test_half_precision_keeps_the_solvers_counts(self, tmp_path: Path) -> None:
        preset = replace(toy(), precision="bf16", steps=2, log_every=1)
        run = Run.create(tmp_path / "run", "toy", preset)
        train(run, preset, quiet=True, cpu=True)
        assert all(line["nfe"] > 1 for line in run.lines("train"))
        with pytest.raises(ZooError, match="fp16 needs an accelerator"):
            train(run, replace(preset, precision="fp16"), quiet=True, cpu=True)

    def test_a_loss_that_is_no_number_ends_the_run(self, tmp_path: Path) -> None:
        preset = replace(toy(), optim=SGD(lr=1e30))
        run = Run.create(tmp_path / "run", "toy", preset)
        with pytest.raises(ZooError, match=r"the loss is .* lower the learning rate"):
            train(run, preset, quiet=True, cpu=True)
        assert all(torch.isfinite(t).all() for t in read_weights(run).values())

    def test_a_score_that_is_no_number_never_wins(self) -> None:
        score = Score("accuracy")
        nan = float("nan")
        assert not score.better(nan, None)
        assert score.better(0.5, nan)
        assert score.better(0.5, None)

    @pytest.mark.slow
    def test_two_processes_train_one_model(self, tmp_path: Path) -> None:
        root, out = Path(__file__).parents[2], tmp_path / "run"
        code = (
            "import sys; from tests.zoo import toy; from deq_zoo.cli import main;"
            "sys.exit(main(sys.argv[1:]))"
        )
        script = tmp_path / "go.py"
        script.write_text(code)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2",
                   "--master_addr", "127.0.0.1", "--master_port", "29655", str(script),
                   "train", "toy", "--cpu", "--out", str(out), "--set", "steps=12"]  # fmt: skip
        env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=env, cwd=root, timeout=240)
        run = Run.open(out)
        assert [line["step"] for line in run.lines("train")] == [4, 8, 12]
        assert (out / "report.html").exists()
        assert len(Checkpoint.load(run.last).carry) == 2
        subprocess.run([*command, "--resume"], check=True, env=env, cwd=root, timeout=240)

    def test_accumulation_and_clipping(self, tmp_path: Path) -> None:
        preset = replace(toy(), accumulate=2, clip=0.1, steps=4, optim=SGD(lr=0.1, momentum=0.0))
        run = Run.create(tmp_path / "run", "toy", preset)
        train(run, preset, quiet=True, cpu=True)
        torch.manual_seed(0)
        assert Checkpoint.load(run.last).step == 4

    def test_no_entry_of_a_clipped_gradient_is_larger_than_allowed(self, tmp_path: Path) -> None:
        states = []
        for name, steps in (("one", 1), ("two", 2)):
            preset = replace(
                toy(), steps=steps, clip_value=1e-3, optim=SGD(lr=1.0, momentum=0.0), eval_every=0
            )
            run = Run.create(tmp_path / name, "toy", preset)
            train(run, preset, quiet=True, cpu=True)
            states.append(read_weights(run))
        largest = max(float((states[1][key] - states[0][key]).abs().max()) for key in states[0])
        assert largest == pytest.approx(1e-3, rel=1e-3)

    @pytest.mark.slow
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    def test_a_signal_leaves_a_run_that_resumes_exactly(
        self, number: signal.Signals, tmp_path: Path
    ) -> None:
        preset = replace(toy(), steps=400, save_every=7, eval_every=400)
        whole = Run.create(tmp_path / "whole", "toy", preset)
        train(whole, preset, quiet=True, cpu=True)
        killed = Run.create(tmp_path / "killed", "toy", preset)
        code = (
            "from pathlib import Path; from tests.zoo import toy; from deq_zoo.run import Run;"
            "from deq_zoo.training import train; import sys;"
            f"run = Run.open(Path({str(killed.path)!r}));"
            "r = train(run, run.preset(), quiet=True, cpu=True); sys.exit(128 + r.interrupted)"
        )
        process = subprocess.Popen([sys.executable, "-c", code])
        while not killed.log_file.exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait() == (-9 if number == signal.SIGKILL else 128 + number)
        assert 0 <= Checkpoint.load(killed.last).step < 400
        train(killed, preset, quiet=True, cpu=True, resume=True)
        torch.testing.assert_close(read_weights(killed), read_weights(whole), rtol=0, atol=0)
