"""Training batches from worker processes: the same ones, and no worker that hangs or stays."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from deq_zoo.batches import count_workers, open_batches
from deq_zoo.errors import DataError, ZooError
from deq_zoo.preset import Preset
from deq_zoo.task import WHOLE, Shard
from tests.zoo.toy import Toy, toy


@dataclass(frozen=True)
class Troubled(Toy):
    """A toy whose third batch is in trouble."""

    trouble: str = ""

    def train_batch(self, step: int, seed: int, shard: Shard = WHOLE) -> Any:
        if step == 2 and self.trouble == "broken file":
            raise DataError("images/3.jpg is not an image")
        if step == 2 and self.trouble == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 2 and self.trouble == "stuck":
            time.sleep(1000)
        if step == 2 and self.trouble == "bug":
            raise ArithmeticError("a bug")
        return super().train_batch(step, seed, shard)


def troubled(trouble: str, workers: int = 1) -> Preset:
    return replace(toy(), task=Troubled(trouble=trouble), workers=workers)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_batches_are_the_tasks_own_from_any_step_on(workers: int) -> None:
    preset, shard = replace(toy(), workers=workers), Shard(1, 2)
    before = torch.get_rng_state()
    with open_batches(preset, 3, shard) as batches:
        for k in range(3, 9):
            expected = preset.task.train_batch(k, preset.seed, shard)
            for got, want in zip(next(batches), expected, strict=True):
                assert torch.equal(got, want)
        assert len(multiprocessing.active_children()) == workers
    assert torch.equal(torch.get_rng_state(), before)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_data_keeps_its_message(workers: int) -> None:
    with (
        pytest.raises(DataError, match=r"^images/3\.jpg is not an image$"),
        open_batches(troubled("broken file", workers), 0, WHOLE) as batches,
    ):
        for _ in batches:
            pass
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ("killed", r"a worker process that makes batches has ended .*--set workers=0"),
        ("stuck", r"none of the 1 worker processes has made a batch .*--set workers=0"),
    ],
)
def test_a_worker_that_dies_or_hangs_is_an_error(trouble: str, message: str) -> None:
    with (
        pytest.raises(ZooError, match=message),
        open_batches(troubled(trouble), 0, WHOLE, patience=1.0) as batches,
    ):
        for _ in batches:
            pass
    assert not multiprocessing.active_children()


def test_a_bug_in_a_worker_is_not_a_mistake_of_the_user() -> None:
    with (
        pytest.raises(ArithmeticError, match="a bug"),
        open_batches(troubled("bug"), 0, WHOLE) as batches,
    ):
        for _ in batches:
            pass
    assert not multiprocessing.active_children()


def test_the_first_batch_is_made_before_there_are_workers() -> None:
    with (
        pytest.raises(DataError),
        open_batches(troubled("broken file"), 2, WHOLE),
    ):
        pytest.fail("the error comes when the block is entered")


def test_a_signal_to_the_group_leaves_the_workers_alone() -> None:
    with open_batches(replace(toy(), workers=2), 0, WHOLE) as batches:
        next(batches), next(batches)
        for child in multiprocessing.active_children():
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(child.pid or 0, number)
        for _ in range(8):
            next(batches)
    assert not multiprocessing.active_children()


def test_workers_are_chosen_by_the_task_and_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(12), raising=False)
    assert count_workers(toy()) == 0
    assert count_workers(replace(toy(), workers=3)) == 3
    monkeypatch.setattr(Toy, "costly_batches", True)
    assert count_workers(toy()) == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert count_workers(toy()) == 5
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "12")
    assert count_workers(toy()) == 1
    assert count_workers(replace(toy(), workers=0)) == 0
