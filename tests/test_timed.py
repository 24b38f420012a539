"""Long benchmarks: training for a processor time, and rows that are stored one by one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.rows import Job, Row, make_rows
from benchmarks.storing import read
from benchmarks.timed import TimedTraining
from deq_zoo.files import write_atomically
from tests.waiting import wait_for


class Toy(TimedTraining[nn.Module]):
    """A linear map whose every update takes some milliseconds."""

    def __init__(self, seconds: float, file: Path, identity: object = "toy") -> None:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        super().__init__(model, optimizer, seconds, file, identity)

    def update(self, share: float) -> Any:
        assert 0 <= share < 1
        began = time.process_time()
        while time.process_time() - began < 0.004:
            pass
        loss = self.model(torch.randn(4, 2)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.counts["updates"] += 1
        return torch.tensor(self.step)

    def due(self) -> bool:
        return self.step in (2, 4)

    def look(self) -> dict[str, Any]:
        self.large = torch.ones(20_000_000)  # 80 MB, which no update needs
        return {"loss": 0.0}


def test_a_run_ends_with_its_time_and_its_peak_is_that_of_updates(tmp_path: Path) -> None:
    run = Toy(0.05, tmp_path / "a.safetensors")
    run.run()
    figures = run.figures()
    assert run.spent >= 0.05
    assert figures["ms_per_step"] >= 4
    assert figures["peak_mb"] < 40
    assert [point["updates"] for point in figures["curve"]] == [2, 4, run.step]


def test_a_stopped_run_goes_on_and_a_finished_one_keeps_its_figures(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    first = Toy(0.03, file)
    first.run()
    again = Toy(0.03, file)
    again.run()  # nothing is left to do
    assert again.figures() == first.figures()
    longer = Toy(0.06, file)
    assert longer.step == first.step
    assert torch.equal(torch.as_tensor(longer.carry), torch.tensor(first.step - 1))
    longer.run()
    assert longer.step > first.step
    assert longer.counts["updates"] == longer.step


def test_the_checkpoint_of_another_run_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    Toy(0.01, file, ("lr", 0.1)).run()
    with pytest.raises(RuntimeError, match="other settings"):
        Toy(0.01, file, ("lr", 0.2))


def square(number: int) -> Row:
    if number < 0:
        raise ValueError("negative")
    return {"square": number**2, "list": [number]}


def test_rows_are_stored_one_by_one_and_only_missing_ones_are_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.json"
    jobs = [Job("two", square, (2,)), Job("bad", square, (-1,))]
    with pytest.raises(ValueError, match="negative"):
        make_rows(file, "part", iter(jobs), seeds=[0], processes=1)
    jobs[1] = Job("three", square, (3,))
    jobs[0] = Job("two", square, (-2,))  # is there already
    make_rows(file, "part", iter(jobs), seeds=[0], processes=1)
    found = read(file)["part"]["rows"]
    assert {key: row["square"] for key, row in found.items()} == {"two": 4, "three": 9}
    assert "three  square 9\n" in capsys.readouterr().out
    origins = read(file)["part"]["origins"]
    assert list(origins) == ["two", "three"]
    assert all(each.keys() == {"command", "commit", "machine"} for each in origins.values())


def _say_and_wait(file: str) -> Row:
    write_atomically(Path(file), str(os.getpid()))
    time.sleep(300)
    return {}


def test_no_row_outlives_its_benchmark(tmp_path: Path) -> None:
    said = tmp_path / "pid"
    program = (
        "from pathlib import Path; from benchmarks.rows import Job, make_rows; "
        "from tests.test_timed import _say_and_wait; "
        f"jobs = [Job('a', _say_and_wait, ({str(said)!r},))]; "
        f"make_rows(Path({str(tmp_path / 'rows.json')!r}), 'part', iter(jobs), [0], 1)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program])
    try:
        wait_for(said.exists, 60)
        row = int(said.read_text())
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: not is_alive(row))


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
