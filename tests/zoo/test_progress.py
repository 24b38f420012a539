"""What takes long is named, and the end of a run by time or by Ctrl-C is announced."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from deq_zoo.cli import main
from deq_zoo.progress import naming_what_takes_long
from deq_zoo.run import Run
from deq_zoo.signals import interruptible
from tests.zoo.toy import Toy


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deq_zoo.progress._PATIENCE", 0.25)


@pytest.mark.usefixtures("impatient")
def test_only_what_takes_long_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for seconds, quiet, lines in ((0.0, False, 0), (0.6, True, 0), (0.6, False, 2)):
        with naming_what_takes_long("thinking", quiet):
            time.sleep(seconds)
        err = capsys.readouterr().err
        assert err.count("\n") == lines, (seconds, quiet)
    assert err == "deq-zoo: thinking ...\ndeq-zoo: thinking: 1 s\n"


def slowly(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        time.sleep(0.5)
        return function(*args, **options)

    return call


@pytest.mark.usefixtures("impatient")
def test_a_slow_update_and_a_slow_evaluation_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        patch.object(Toy, "loss", slowly(Toy.loss)),
        patch.object(Toy, "evaluate", slowly(Toy.evaluate)),
    ):
        words = ["train", "toy", "--cpu", "--no-report", "--out", str(tmp_path / "run")]
        assert main([*words, "--steps", "2"]) == 0
    err = capsys.readouterr().err
    assert "deq-zoo: update 1 of 2, the first ...\n" in err
    assert "update 2" not in err
    assert "deq-zoo: evaluating on validation data after step 2 ...\n" in err
    assert "deq-zoo: scoring the test data ...\n" in err


def test_a_run_out_of_time_ends_without_evaluation_and_report_and_says_how_to_get_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path / "run")
    words = ["train", "toy", "--cpu", "--quiet", "--max-seconds", "1e-9", "--out", str(run.path)]
    assert main(words) == 0
    assert run.last.exists()
    assert not list(run.lines("eval"))
    assert not run.report.exists()
    err = capsys.readouterr().err
    assert f"stopped at step 1 of 24; --resume goes on from {run.path}" in err
    assert "deq-zoo evaluate and deq-zoo report" in err
    assert main(["report", str(run.path)]) == 0
    assert run.report.exists()


def test_ctrl_c_is_answered_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    with interruptible() as received:
        os.kill(os.getpid(), signal.SIGINT)
        assert "stopping after this step, with a checkpoint" in capfd.readouterr().err
    assert received == [signal.SIGINT]
    with interruptible(quiet=True):
        os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err == ""
