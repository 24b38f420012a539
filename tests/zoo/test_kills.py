"""A process that is killed at any moment: the others end, the run goes on with another number."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from deq_zoo import checkpoint
from deq_zoo.checkpoint import Checkpoint
from deq_zoo.run import Run
from tests.zoo.disagreeing import Disagreeing
from tests.zoo.launching import finish, launch

PHASES = "DEQ_ZOO_TEST_PHASES"  # a file that gets a line at the beginning of each phase
SECONDS = 0.4  # that a phase takes at least, where the variable is set
GONE = ("is gone: it was killed", "the process that coordinates the run is gone")


def enter(phase: str) -> None:
    """Note that a phase begins, and stay in it for a while."""
    if PHASES in os.environ:
        with Path(os.environ[PHASES]).open("a") as file:
            file.write(f"{phase}\n")
        time.sleep(SECONDS)


@pytest.fixture(autouse=True)
def _slow_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the phases long enough to be hit; the processes are forks of this one."""
    loss, evaluate = Disagreeing.loss, Disagreeing.evaluate

    def slow_loss(task: Any, model: Any, batch: Any, carry: Any) -> Any:
        out = loss(task, model, batch, carry)
        enter("step")  # after forward, before backward
        return out

    def slow_evaluate(task: Any, *args: Any) -> Any:
        enter("evaluation")
        return evaluate(task, *args)

    def slow_save(tensors: Any, path: Path, metadata: Any) -> None:
        if PHASES in os.environ:
            path.write_bytes(b"half of a file")
        enter("save")
        save_file(tensors, path, metadata)

    monkeypatch.setattr(Disagreeing, "loss", slow_loss)
    monkeypatch.setattr(Disagreeing, "evaluate", slow_evaluate)
    monkeypatch.setattr(checkpoint, "save_file", slow_save)


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(10))
def test_the_others_end_and_another_number_goes_on(
    trial: int, tmp_path: Path, record_property: Any
) -> None:
    draw = random.Random(trial)
    phase = ("step", "save", "evaluation")[trial % 3]
    parallel, world = ("ddp", "fsdp")[trial % 2], draw.choice((2, 2, 3))
    victim, others = draw.randrange(world), draw.choice([n for n in (1, 2, 3) if n != world])
    out, phases = tmp_path / "run", tmp_path / "phases"
    command = ["train", "disagreeing", "--cpu", "--quiet", "--no-report", "--out", str(out)]
    command += ["--set", f"parallel={parallel}", "--set", "steps=12"]
    rhythm = ["--set", "save_every=2", "--set", "eval_every=2"]
    processes = launch(tmp_path, world, *command, *rhythm, **{PHASES: str(phases)})
    wait_for(phases, phase, draw.randint(2, 4) * (world if phase == "step" else 1), processes)
    time.sleep(draw.uniform(0, SECONDS))
    processes[victim].kill()
    began, ended = time.monotonic(), []
    for rank, process in enumerate(processes):
        process.join(max(0.1, 30 - (time.monotonic() - began)))
        if rank != victim:
            ended.append(round(time.monotonic() - began, 1))
    messages = finish(tmp_path, processes)
    what = f"{phase}, {parallel}, process {victim} of {world}, then {others} processes: {ended} s"
    record_property("kill", what)
    print(what)
    for rank, message in enumerate(messages):
        if rank != victim:
            assert message.endswith("exit 2"), message
            assert any(words in message for words in GONE), message
            assert "Traceback" not in message, message
    assert max(ended) < 30
    assert Checkpoint.load(Run(out).last).step < 12
    for end in finish(tmp_path, launch(tmp_path, others, *command, "--resume")):
        assert end.endswith("exit 0"), end
    assert Checkpoint.load(Run(out).last).step == 12


def wait_for(phases: Path, phase: str, count: int, processes: list[Any]) -> None:
    """Wait until a phase has begun so often."""
    until = time.monotonic() + 60
    while not phases.exists() or phases.read_text().split().count(phase) < count:
        assert all(process.is_alive() for process in processes)
        assert time.monotonic() < until
        time.sleep(0.01)
