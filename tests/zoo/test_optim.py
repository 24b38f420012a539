"""Learning-rate schedules, and the kernel of Adam."""

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


def stepped(optimizer: torch.optim.Optimizer, p: torch.nn.Parameter, seeds: range) -> None:
    """Make an update for each seed, with random gradients."""
    for seed in seeds:
        rng = torch.Generator().manual_seed(seed)
        p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=rng))
        optimizer.step()


def test_a_state_from_a_file_has_the_memory_order_of_its_weight() -> None:
    def weight() -> torch.nn.Parameter:
        w = torch.linspace(-1, 1, 2 * 3 * 4 * 4).view(2, 3, 4, 4)
        return torch.nn.Parameter(w.to(memory_format=torch.channels_last))

    whole, first, second = weight(), weight(), weight()
    stepped(Adam(lr=0.1).make([whole]), whole, range(6))
    optimizer = Adam(lr=0.1).make([first])
    stepped(optimizer, first, range(3))
    state = optimizer.state_dict()
    for name, value in state["state"][0].items():  # as checkpoints keep it
        state["state"][0][name] = value.contiguous()
    second.data.copy_(first.data)
    resumed = Adam(lr=0.1).make([second])
    resumed.load_state_dict(state)
    stepped(resumed, second, range(3, 6))
    assert torch.equal(second, whole)


@pytest.mark.parametrize("was_fused", [True, None])
def test_a_state_does_not_change_the_kernel_of_the_optimizer_that_loads_it(
    was_fused: bool | None,
) -> None:
    p, q = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    old = torch.optim.AdamW([p], lr=0.1, fused=was_fused)
    stepped(old, p, range(2))
    new = Adam(lr=0.1).make([q])
    given = old.state_dict()
    new.load_state_dict(given)
    assert new.param_groups[0]["fused"] is True
    assert given["param_groups"][0]["fused"] is was_fused  # the caller's state is unchanged
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(q.sum()).backward()
    scaler.step(new)
    assert not torch.equal(q, torch.ones(3))


def test_weights_with_gaps_in_memory_are_changed_alone() -> None:
    base = torch.ones(4, 6)
    p = torch.nn.Parameter(base[:, ::2])
    stepped(Adam(lr=0.1).make([p]), p, range(1))
    assert torch.equal(base[:, 1::2], torch.ones(4, 3))
    assert not torch.equal(p, torch.ones(4, 3))
