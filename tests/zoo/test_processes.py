"""Several processes: they decide together, end together, and resume bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from deq_zoo.checkpoint import Checkpoint
from deq_zoo.errors import ZooError
from deq_zoo.processes import TIMEOUT, Processes, read_timeout, start_processes
from deq_zoo.run import Run
from deq_zoo.running_statistics import merged_statistics
from tests.zoo.disagreeing import disagreeing
from tests.zoo.launching import finish, free_port, launch

QUIET = ("--cpu", "--quiet", "--no-report")


def wait_for_step(run: Run, step: int, processes: list[Any]) -> None:
    while all(line["step"] < step for line in run.lines("train")):
        assert all(process.is_alive() for process in processes)
        time.sleep(0.02)


def test_two_processes_that_disagree_train_one_model(tmp_path: Path) -> None:
    """They stop in the middle and resume: the weights are those of a run without a stop."""
    out = [tmp_path / name for name in ("whole", "stopped")]
    start = ["train", "disagreeing", *QUIET, "--set", "steps=20", "--out"]
    for end in finish(tmp_path, launch(tmp_path, 2, *start, str(out[0]))):
        assert end.endswith("exit 0"), end
    for options in (["--max-seconds", "1e-9"], ["--resume"]):
        for end in finish(tmp_path, launch(tmp_path, 2, *start, str(out[1]), *options)):
            assert end.endswith("exit 0"), end
    whole, resumed = (Checkpoint.load(Run(folder).last) for folder in out)
    assert whole.step == resumed.step == 20
    torch.testing.assert_close(resumed.model, whole.model, rtol=0, atol=0)
    for ours, other in zip(resumed.by_process, whole.by_process, strict=True):
        torch.testing.assert_close(ours["buffers"], other["buffers"], rtol=0, atol=0)
    # The processes have statistics of their own; the saved ones are of both together.
    own = [each["buffers"]["norm.running_mean"] for each in whole.by_process]
    assert not torch.equal(*own)
    torch.testing.assert_close(whole.model["norm.running_mean"], sum(own) / 2)
    logs = [[line for line in Run(folder).lines("eval") if line["step"] > 1] for folder in out]
    assert logs[0] == logs[1]
    assert [line["step"] for line in logs[0]] == [5, 10, 15, 20]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_the_loss_of_one_process_ends_the_other_soon(tmp_path: Path, victim: int) -> None:
    out = tmp_path / "run"
    start = ["train", "disagreeing", *QUIET, "--out", str(out)]
    processes = launch(tmp_path, 2, *start, "--set", "pause=0.02")
    wait_for_step(Run(out), 40, processes)
    processes[victim].kill()
    began = time.monotonic()
    processes[1 - victim].join(30)
    assert time.monotonic() - began < 30
    message = finish(tmp_path, processes)[1 - victim]
    assert message.endswith("exit 2")
    assert f"deq-zoo: process {victim} of 2 (process id {processes[victim].pid} on" in message
    assert "is gone: it was killed" in message
    assert "go on with --resume and 2 processes" in message
    assert "Traceback" not in message
    for end in finish(tmp_path, launch(tmp_path, 2, *start, "--resume")):
        assert end.endswith("exit 0"), end
    assert Checkpoint.load(Run(out).last).step == 100


@pytest.mark.slow
def test_a_process_that_fails_alone_ends_the_other(tmp_path: Path) -> None:
    start = ["train", "disagreeing", *QUIET, "--out", str(tmp_path / "run")]
    first, second = finish(tmp_path, launch(tmp_path, 2, *start, "--set", "fails_at=7"))
    assert first.endswith("exit 2")
    assert "deq-zoo: process 1 of 2 failed: this process alone has failed" in first
    assert "Traceback" not in first
    assert "ArithmeticError" in second


@pytest.mark.slow
def test_a_process_that_hangs_ends_the_other_at_the_timeout(tmp_path: Path) -> None:
    start = ["train", "disagreeing", *QUIET, "--out", str(tmp_path / "run")]
    processes = launch(tmp_path, 2, *start, "--set", "pause=0.02", DEQ_ZOO_TIMEOUT="3")
    wait_for_step(Run(tmp_path / "run"), 10, processes)
    assert processes[1].pid is not None
    os.kill(processes[1].pid, 19)  # SIGSTOP
    processes[0].join(30)
    os.kill(processes[1].pid, 18)  # SIGCONT
    first, second = finish(tmp_path, processes)
    assert "another process gave no answer for 3 s" in first
    assert first.endswith("exit 2")
    assert second.endswith("exit 2")


@pytest.mark.slow
def test_one_error_of_the_folder_ends_all(tmp_path: Path) -> None:
    start = ["train", "disagreeing", *QUIET, "--out", str(tmp_path / "run"), "--set", "steps=2"]
    finish(tmp_path, launch(tmp_path, 2, *start))
    with Run(tmp_path / "run").locked():
        for end in finish(tmp_path, launch(tmp_path, 2, *start, "--force")):
            assert "has been training in" in end
            assert end.endswith("exit 2")


@pytest.mark.slow
def test_a_launcher_that_ends_the_others_leaves_time_for_the_message(tmp_path: Path) -> None:
    root, out, script = Path(__file__).parents[2], tmp_path / "run", tmp_path / "go.py"
    script.write_text(
        "import sys; from tests.zoo import disagreeing; from deq_zoo.cli import main;"
        "sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
               "2", str(script), "train", "disagreeing", *QUIET, "--out", str(out)]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    options: Any = {"env": env, "cwd": root, "text": True}
    launcher = subprocess.Popen(
        [*command, "--set", "pause=0.02"], stderr=subprocess.PIPE, **options
    )
    while all(line["step"] < 20 for line in Run(out).lines("train")):
        assert launcher.poll() is None
        time.sleep(0.05)
    children = subprocess.check_output(["ps", "-o", "pid=", "--ppid", str(launcher.pid)], text=True)
    os.kill(int(children.split()[-1]), 9)
    _, errors = launcher.communicate(timeout=60)
    assert "is gone: it was killed" in errors
    subprocess.run([*command, "--resume"], check=True, timeout=240, **options)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.plain = nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False)


def test_merged_statistics_are_those_of_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 50, 3, dtype=torch.float64) * torch.tensor([[[1.0]], [[3.0]]]) + 2
    model = Normed().double()

    class Two:
        count, rank, is_main = 2, 0, True
        accelerator: Any = None

        def gather(self, value: torch.Tensor) -> torch.Tensor:
            """Return the statistics of both processes: those asked for are the first's."""
            both = [x.mean(1), x.var(1, correction=0)]
            return next(t for t in both if torch.equal(t[:1], value))

    processes: Any = Two()
    processes.accelerator = processes
    model.norm.running_mean = x[0].mean(0)
    model.norm.running_var = x[0].var(0, correction=0)
    with merged_statistics(model, processes) as own:
        merged = {name: b.clone() for name, b in model.named_buffers()}
    flat = x.view(-1, 3)
    torch.testing.assert_close(merged["norm.running_mean"], flat.mean(0))
    torch.testing.assert_close(merged["norm.running_var"], flat.var(0, correction=0))
    assert torch.equal(own["norm.running_mean"], x[0].mean(0))
    assert torch.equal(model.norm.running_var, x[0].var(0, correction=0))


def test_a_launcher_that_started_one_of_two_processes_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")  # as accelerate launch --cpu sets it
    assert isinstance(start_processes(disagreeing(), cpu=True), Processes)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")  # with --num_processes 2, and nothing else
    with pytest.raises(ZooError, match=r"has started one: use torchrun --nproc_per_node"):
        start_processes(disagreeing(), cpu=True)


def test_a_world_without_a_meeting_place_is_an_error_of_one_line() -> None:
    message = r"did not find each other: .*unset it to train with one"
    with patch.dict(os.environ, WORLD_SIZE="2"):  # left over from a launcher
        os.environ.pop("MASTER_ADDR", None)
        with pytest.raises(ZooError, match=message):
            start_processes(disagreeing(), cpu=True)


def test_the_timeout_is_a_positive_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_timeout() == 1800
    monkeypatch.setenv(TIMEOUT, "12.5")
    assert read_timeout() == 12.5
    for text in ("0", "-1", "nan", "inf", "soon"):
        monkeypatch.setenv(TIMEOUT, text)
        with pytest.raises(ZooError, match="must be a number of seconds above 0"):
            read_timeout()


_ENDING = """
import atexit
from pathlib import Path
import torch.distributed as dist

def report():
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    print(dist.is_initialized(), sum("gloo" in name for name in threads))

atexit.register(report)  # the first comes last
from deq_zoo.cli import main
import tests.zoo.disagreeing
assert main({arguments}) == 0
print(dist.is_initialized())
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads as Linux does")
def test_no_thread_of_the_process_group_outlives_the_program(tmp_path: Path) -> None:
    """A thread of gloo that drops a tensor in an ending interpreter aborts the process."""
    words = ["train", "disagreeing", *QUIET, "--set", "steps=3", "--out", str(tmp_path / "run")]
    program = _ENDING.format(arguments=words)
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=os.environ | world | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    for process in processes:
        assert process.communicate(timeout=100)[0].split()[-3:] == ["True", "False", "0"]
        assert process.returncode == 0
