"""`--launch N`: several processes for those who do not know a launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from deq_zoo.checkpoint import Checkpoint
from deq_zoo.cli import main
from deq_zoo.errors import ZooError
from deq_zoo.launch import check_launch, without_launch
from deq_zoo.run import Run

ROOT = Path(__file__).parents[2]


def start(out: Path, *options: str) -> subprocess.Popen[str]:
    """Start a training of two processes, of a family that is quick to import."""
    path = os.pathsep.join([str(ROOT / "tests/contracts/outside"), str(ROOT)])
    words = ["train", "sums-smoke", "--launch", "2", "--no-report", "--out", str(out)]
    if torch.accelerator.is_available():  # elsewhere, the CPU needs no word
        words.append("--cpu")
    pipe: Any = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-m", "deq_zoo", *words, *options],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=pipe,
        stderr=pipe,
        text=True,
        cwd=ROOT,
    )


def wait_for_step(run: Run, step: int, launcher: subprocess.Popen[str]) -> None:
    while all(line["step"] < step for line in run.lines("train")):
        assert launcher.poll() is None, launcher.communicate()
        time.sleep(0.05)


def children(launcher: subprocess.Popen[str]) -> list[int]:
    """Return the ids of the processes of a run, process 0 first."""
    found = subprocess.check_output(["ps", "-o", "pid=", "--ppid", str(launcher.pid)], text=True)
    return sorted(map(int, found.split()))


@pytest.mark.slow
def test_two_processes_train_and_process_0_prints(tmp_path: Path) -> None:
    launcher = start(tmp_path / "run")
    output, errors = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, errors
    lines = [json.loads(line) for line in output.splitlines()]
    assert len(Checkpoint.load(Run(tmp_path / "run").last).carry) == 2
    assert "mse" in lines[-1]
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == sorted(set(steps))  # each once
    assert steps[-1] == 8


@pytest.mark.slow
class TestItsEnd:
    LONG = ("--set", "steps=100000", "--set", "log_every=50", "--set", "save_every=50")

    @pytest.mark.parametrize("victim", [0, 1])
    def test_a_killed_process_ends_all(self, victim: int, tmp_path: Path) -> None:
        launcher = start(tmp_path / "run", *self.LONG)
        wait_for_step(Run(tmp_path / "run"), 100, launcher)
        os.kill(children(launcher)[victim], signal.SIGKILL)
        began = time.monotonic()
        _, errors = launcher.communicate(timeout=300)
        assert time.monotonic() - began < 30
        assert launcher.returncode == 128 + 9
        assert f"process {victim} of 2 was killed by signal 9 (SIGKILL)" in errors
        assert Checkpoint.load(Run(tmp_path / "run").last).step >= 50  # logs come first

    @pytest.mark.parametrize("to_all", [False, True])
    def test_an_interrupt_leaves_a_checkpoint(self, to_all: bool, tmp_path: Path) -> None:
        """Ctrl-C reaches the launcher and its processes at once; another program, the launcher."""
        launcher = start(tmp_path / "run", *self.LONG)
        wait_for_step(Run(tmp_path / "run"), 100, launcher)
        processes = children(launcher)
        for process in (launcher.pid, *(processes if to_all else ())):
            os.kill(process, signal.SIGINT)
        _, errors = launcher.communicate(timeout=300)
        assert launcher.returncode == 130, errors
        assert "--resume goes on from" in errors
        assert "Traceback" not in errors
        assert Checkpoint.load(Run(tmp_path / "run").last).step >= 100

    def test_the_message_of_a_process_that_fails_is_shown(self, tmp_path: Path) -> None:
        launcher = start(tmp_path / "run", "--set", "workers=-1")
        _, errors = launcher.communicate(timeout=300)
        assert launcher.returncode == 2
        assert "workers" in errors


class TestMistakes:
    @pytest.mark.parametrize("number", ["0", "-1", "two", "1.5"])
    def test_a_wrong_number(self, number: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["train", "toy", f"--launch={number}"]) == 2
        assert "takes a whole number from 1 on" in capsys.readouterr().err

    def test_a_launcher_within_a_launcher(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert main(["train", "toy", "--cpu", "--launch", "2"]) == 2
        assert "a launcher has started this one already (WORLD_SIZE" in capsys.readouterr().err

    def test_more_processes_than_devices(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
        monkeypatch.setattr("torch.accelerator.device_count", lambda: 1)
        check_launch(1, False, {})
        check_launch(2, True, {})
        with pytest.raises(ZooError, match=r"--launch 2 needs as many devices, .* has 1"):
            check_launch(2, False, {})


def test_the_processes_get_the_other_arguments() -> None:
    words = ["train", "toy", "--launch", "2", "--set", "lr=1"]
    assert without_launch(words) == ["train", "toy", "--set", "lr=1"]
    assert without_launch(["train", "--launch=2", "toy"]) == ["train", "toy"]
