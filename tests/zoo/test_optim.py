"""Learning-rate schedules."""

from __future__ import annotations

import pytest
import torch

from deq_zoo.optim import Adam, Constant, Cosine, MultiStep, OneCycle


class TestSchedules:
    def test_values(self) -> None:
        assert Constant().factor(5, 10) == 1
        cosine = Cosine(floor=0.1, warmup=4)
        assert [cosine.factor(k, 24) for k in (0, 3, 4, 14, 24)] == pytest.approx(
            [0.25, 1, 1, 0.55, 0.1]
        )
        assert OneCycle(0.5).factor(0, 10) == pytest.approx(0.2)
        assert OneCycle(0.5).factor(5, 10) == pytest.approx(1.0)
        assert OneCycle(0.5).factor(9, 10) == pytest.approx(0.2)
        assert [MultiStep().factor(k, 8) for k in (3, 4, 6)] == pytest.approx([1, 0.1, 0.01])

    def test_every_group_keeps_its_own_base(self) -> None:
        p, q = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
        optim = Adam(lr=0.1, schedule=MultiStep())
        optimizer = optim.make([p])
        optimizer.add_param_group({"params": [q], "lr": 0.5, "base_lr": 0.5})
        for _ in range(2):
            optim.set_rate(optimizer, 9, 10)
        assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.001, 0.005])
