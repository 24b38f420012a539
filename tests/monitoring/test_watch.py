"""Watching a model: the same numbers, bit for bit, and records of its solves."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchdeq import SolverStat, get_deq, watch
from torchdeq.monitoring import AlarmKind, Record, Watch
from torchdeq.monitoring.alarms import Bells


class Net(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(6, 6)
        self.deq = get_deq(
            f_max_iter=30, ift=True, b_solver="gmres", on_failure="ignore", **options
        )
        self.gain = 0.5

    def forward(self, x: Tensor, writer: Any = None) -> Tensor:
        (z,), _ = self.deq(
            lambda z: torch.tanh(self.gain * self.linear(z) + x), torch.zeros_like(x),
            backward_writer=writer,
        )  # fmt: skip
        out: Tensor = z
        return out


def train(net: Net, steps: int = 4) -> list[Tensor]:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen = []
    for _ in range(steps):
        z = net(torch.randn(3, 6))
        optimizer.zero_grad()
        z.square().sum().backward()
        seen += [
            z.detach().clone(),
            *(p.grad.clone() for p in net.parameters() if p.grad is not None),
        ]
        optimizer.step()
    return seen


def test_outputs_and_gradients_are_the_same_bit_for_bit() -> None:
    plain, watched = train(Net()), Net()
    with watch(watched, every=2):
        seen = train(watched)
    assert all(map(torch.equal, plain, seen))


def test_records_have_both_sides_and_the_file_has_every_record(tmp_path: Path) -> None:
    net, path = Net(), tmp_path / "solves.jsonl"
    with watch(net, every=3, path=path) as watching:
        train(net, 4)
        assert [r.side for r in watching.records] == ["forward", "backward"]
        assert [r.calls for r in watching.records] == [3, 2]  # the third backward comes later
    sides = [(r.side, r.step, r.calls) for r in watching.records]
    assert sides == [("forward", 3, 3), ("backward", 3, 2), ("forward", 4, 1), ("backward", 4, 2)]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [record.as_data() for record in watching.records]
    first = watching.records[0]
    assert first.samples == 9
    assert first.statuses == {"CONVERGED": 9}
    assert 0 < first.residual < 1e-3
    assert first.failed == 0


def test_removing_leaves_no_hook_and_evaluation_is_not_recorded() -> None:
    net = Net()
    watching = watch(net, every=1)
    net.eval()(torch.randn(2, 6))
    assert watching.records == []
    watching.remove()
    assert not net.deq._forward_hooks
    assert not net.deq._forward_pre_hooks
    train(net, 2)
    assert watching.records == []
    watching.remove()  # again: nothing happens


def test_a_writer_of_the_caller_still_gets_its_statistics() -> None:
    net, written = Net(), list[SolverStat]()
    with watch(net) as watching:
        net(torch.randn(3, 6), written.append).sum().backward()
        (z,), _ = net.deq(lambda z: 0.5 * z + net.linear.bias, torch.zeros(2, 6), None, False,
                          written.append)  # fmt: skip
        z.sum().backward()
    assert len(written) == 2
    assert [r.calls for r in watching.records] == [2, 2]


def test_nothing_is_read_from_statistics_between_two_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed: list[int] = []
    compute = SolverStat._compute

    def counting(stats: SolverStat) -> None:
        computed.append(1)
        compute(stats)

    monkeypatch.setattr(SolverStat, "_compute", counting)
    net = Net(f_tol=0.0)
    with watch(net, every=100):
        for _ in range(5):
            net(torch.randn(3, 6))
        assert computed == []
    assert computed


@pytest.mark.slow
def test_a_compiled_model_is_watched_too() -> None:
    net = Net()
    compiled = torch.compile(net, backend="eager")
    with watch(net, every=1) as watching:
        for _ in range(2):
            compiled(torch.randn(3, 6)).sum().backward()
    sides = sorted(record.side for record in watching.records)
    assert sides == ["backward", "backward", "forward", "forward"]


def test_copies_and_pickled_models_are_not_watched() -> None:
    net = Net()
    with watch(net, every=1) as watching:
        twin = copy.deepcopy(net)
        loaded = pickle.loads(pickle.dumps(net.deq))
        train(twin, 2)
        loaded(lambda z: 0.5 * z, torch.ones(1, 2))
        assert watching.records == []
        train(net, 1)
        assert len(watching.records) == 1


def test_a_failing_adjoint_and_a_rising_residual_ring_once_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = Net()
    rung: list[Any] = []
    with watch(net, every=2, on_alarm=rung.append) as watching:
        train(net, 4)
        assert rung == []
        with torch.no_grad():
            net.linear.weight.copy_(6 * torch.linalg.qr(torch.randn(6, 6)).Q)
        net.deq.b_max_iter = 1
        for _ in range(3):
            train(net, 2)
    kinds = [alarm.kind for alarm in rung]
    assert len(kinds) == len(set(kinds))
    assert {AlarmKind.RESIDUAL_RISING, AlarmKind.ADJOINT_FAILING} <= set(kinds)
    assert watching.alarms == rung
    assert "deq, step" in str(rung[0])
    caplog.set_level(logging.WARNING, "torchdeq")
    net.deq.f_max_iter = 1
    with watch(net, every=1):
        train(net, 2)
    assert any("backward solve misses its tolerance" in r.message for r in caplog.records)


def make_record(residual: float, failed: int, side: Any = "forward", **other: int) -> Record:
    statuses = {"CONVERGED": 10 - failed, "MAX_ITER": failed, **other}
    return Record("deq", side, 1, 1, 10 + sum(other.values()), 5.0, residual, residual, statuses)


def test_alarms_follow_their_rules() -> None:
    bells = Bells()
    assert bells.ring(make_record(1e-4, 0)) == []
    assert bells.ring(make_record(5e-3, 0)) == []  # worse, but within the tolerance
    kinds = [a.kind for a in bells.ring(make_record(5e-3, 6))]
    assert kinds == [AlarmKind.RESIDUAL_RISING, AlarmKind.BUDGET_OUTGROWN]
    assert bells.ring(make_record(5e-3, 9)) == []
    assert [a.kind for a in bells.ring(make_record(5e-3, 0, NONFINITE=1))] == [AlarmKind.NONFINITE]
    assert [a.kind for a in bells.ring(make_record(0.1, 5, "backward"))] == [
        AlarmKind.ADJOINT_FAILING
    ]


def test_tensorboard_gets_scalars_from_a_folder_or_a_writer(tmp_path: Path) -> None:
    class Writer:
        def __init__(self) -> None:
            self.tags: list[str] = []

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            self.tags.append(tag)

    net, writer = Net(), Writer()
    with watch(net, tensorboard=writer):
        train(net, 1)
    assert "deq/forward/residual" in writer.tags
    pytest.importorskip("tensorboard")
    with watch(net, tensorboard=tmp_path / "board"):
        train(net, 1)
    assert list((tmp_path / "board").glob("events*"))


def test_errors_say_what_is_missing() -> None:
    with pytest.raises(ValueError, match="no DEQ inside to watch"):
        watch(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="every must be a whole number"):
        watch(Net(), every=0)
    assert isinstance(watch(get_deq()), Watch)  # a DEQ itself


@pytest.mark.parametrize("batch", [0, 3])
def test_a_fixed_number_of_adjoint_steps_and_an_empty_batch_ring_no_alarm(batch: int) -> None:
    deq = get_deq(ift=True, f_max_iter=5, f_tol=0.0, b_solver="gmres", b_max_iter=2,
                  b_tol=0.0 if batch else 1e-6)  # fmt: skip
    x = torch.ones(batch, 2, requires_grad=True)
    with watch(deq, every=1) as watching:
        states, _ = deq(lambda z: torch.tanh(0.5 * z.flip(1) + x), torch.zeros_like(x))
        states[-1].sum().backward()
    assert watching.alarms == []
    assert all(record.failed == 0 for record in watching.records) is not bool(batch)
    with pytest.raises(TypeError, match=r"must be an nn\.Module"):
        watch(lambda z: z)  # type: ignore[arg-type]
