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


@pytest.mark.parametrize("decoupled", [True, False])
def test_one_kernel_for_all_weights_makes_the_updates_of_torch(decoupled: bool) -> None:
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    rng = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=rng, dtype=torch.float64) for shape in ((3, 4), (4,))]
    ours, theirs = ([torch.nn.Parameter(w.clone()) for w in start] for _ in range(2))
    optimizers = (
        Adam(lr=0.1, weight_decay=0.2, decoupled=decoupled).make(ours),
        kind(theirs, lr=0.1, weight_decay=0.2, foreach=False),
    )
    assert optimizers[0].defaults["fused"]
    for _ in range(5):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=rng, dtype=torch.float64)
            q.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


def test_weights_without_such_a_kernel_have_an_optimizer_too() -> None:
    weight = torch.nn.Parameter(torch.empty(2, device="meta"))
    assert Adam().make([weight]).defaults["fused"] is None
