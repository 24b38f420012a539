"""Means between two lines of the log."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deq_zoo.task import Loss
from deq_zoo.window import Window


class Alone:
    """One process."""

    count = 1

    def mean(self, values: dict[str, float]) -> dict[str, float]:
        return values


def batch(value: float, **metrics: float) -> Loss:
    return Loss(torch.tensor(value), {name: torch.tensor(v) for name, v in metrics.items()})


def emptied(window: Window) -> dict[str, float]:
    alone: Any = Alone()
    return window.empty(alone)


def filled() -> Window:
    window = Window()
    window.add(batch(4.0, nll=3.0), samples=2)
    window.add(batch(2.0, nll=1.0, last_step=0.5), samples=2)
    return window


def test_each_metric_is_divided_by_the_batches_that_have_it() -> None:
    window = filled()
    means = emptied(window)
    assert (means["loss"], means["nll"], means["last_step"]) == (3.0, 2.0, 0.5)
    assert emptied(window).keys() == {"samples_per_s", "lr"}


@pytest.mark.parametrize("processes", [1, 2])
def test_a_window_goes_on_from_its_state(processes: int) -> None:
    window = Window()
    state = filled().state()
    if processes == 1:
        window.restore(state)
    else:
        window.restore_shared([state, state], processes)
    window.add(batch(3.0, last_step=1.5), samples=2)
    means = emptied(window)
    assert (means["loss"], means["nll"], means["last_step"]) == (3.0, 2.0, 1.0)


def test_a_window_of_an_earlier_version_counts_all_batches_for_every_metric() -> None:
    window = Window()
    window.restore({"sums": {"loss": 6.0, "nll": 4.0}, "steps": 2, "samples": 4})
    means = emptied(window)
    assert (means["loss"], means["nll"]) == (3.0, 2.0)
