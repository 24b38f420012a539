"""What one process can show: settings, announcements, errors, and that nothing costs anything."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from copy import deepcopy
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests.distributed.models import WIDTH, Cell, make_net
from tests.versions import needs_cpu_shards
from torchdeq import DEQConfig, StopRule, add_deq_args, fixed_point, get_deq, solve
from torchdeq._torch import UnitSettings
from torchdeq.distributed import collective, hold, peers
from torchdeq.distributed.collectives import announce, listening
from torchdeq.distributed.peers import ALONE, Peers, find_peers, parse_sync_stop
from torchdeq.distributed.sharding import units_inside
from torchdeq.solver import FixedPointIter

# With torch 2.6, gloo also waits for ever where a process group is freed.
pytestmark = needs_cpu_shards


@pytest.fixture
def group() -> Iterator[Any]:
    """Return a process group with this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


class Ear:
    """A listener that writes down what it hears."""

    def __init__(self) -> None:
        self.groups: list[Any] = []

    def notice(self, group: Any) -> None:
        self.groups.append(group)


def make_unit(**settings: Any) -> Any:
    """Return a cell that is a unit of `fully_shard`."""
    from torch.distributed.fsdp import fully_shard

    return fully_shard(Cell(), **settings)


def test_without_a_process_group_no_module_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "reachable_modules", lambda f: pytest.fail("a search"))
    choices: tuple[Any, ...] = (None, True, "world", False)
    for sync_stop in choices:
        assert find_peers(nn.Linear(1, 1), sync_stop, torch.device("cpu")) is ALONE
        stop = StopRule(30, 1e-5, sync_stop=sync_stop)
        assert solve(lambda z: 0.1 * z, torch.ones(2, 1), FixedPointIter(), stop).stats.nfe < 30


def test_a_group_of_one_process_decides_alone(group: Any) -> None:
    assert not find_peers(abs, group, torch.device("cpu")).synchronised
    listener = Peers(listens=True)
    listener.notice(None)
    assert not listener.synchronised
    assert listener.rank == 0


@pytest.mark.parametrize("settings", [{}, {"reshard_after_forward": False}])
@pytest.mark.parametrize("raises", [False, True])
def test_a_held_unit_gets_its_settings_back(group: Any, settings: Any, raises: bool) -> None:
    cell = make_unit(**settings)
    other = make_unit()
    cell.set_modules_to_backward_prefetch([other])
    x = torch.ones(2, WIDTH)
    cell(x, x)  # the first forward pass of a root changes its settings
    cell.reshard()
    before = UnitSettings(cell)
    try:
        with hold(lambda z: cell(z, x)):
            assert UnitSettings(cell).gathered
            cell(x, x)
            assert UnitSettings(cell).gathered
            if raises:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    after = UnitSettings(cell)
    assert not after.gathered
    assert vars(after) == vars(before)


def test_a_solve_scatters_the_units_that_it_has_gathered(group: Any) -> None:
    cell = make_unit(reshard_after_forward=True)
    x = torch.ones(2, WIDTH)
    seen = []

    def f(z: Tensor) -> Tensor:
        seen.append(UnitSettings(cell).gathered)
        return cell(z, x)

    fixed_point(f, x).z.sum().backward()
    assert seen[0] is False
    assert all(seen[1:])
    assert not UnitSettings(cell).gathered
    with pytest.raises(ZeroDivisionError):
        fixed_point(lambda z: cell(z, x) / (1 // 0), x)
    assert not UnitSettings(cell).gathered


@pytest.mark.parametrize("b_solver", ["gmres", "bicgstab", "neumann", "broyden", "anderson"])
@pytest.mark.parametrize("b_tol", [0.0, 1e-8])
@pytest.mark.parametrize("coupled", [None, True, False])
@pytest.mark.parametrize("every", [1, 4])
def test_a_process_without_samples_goes_on_with_the_others(
    group: Any,
    monkeypatch: pytest.MonkeyPatch,
    b_solver: str,
    b_tol: float,
    coupled: Any,
    every: int,
) -> None:
    """One process that agrees with itself: the code is that of a group."""
    monkeypatch.setattr(peers, "_named_group", lambda sync_stop: group)
    w = torch.full((3, 3), 0.1, requires_grad=True)
    x = torch.ones(0, 3)
    deq = get_deq(ift=True, b_solver=b_solver, b_tol=b_tol, coupled=coupled, sync_stop=True,
                  f_check_every=every, b_check_every=every)  # fmt: skip
    states, stats = deq(lambda z: torch.tanh(z @ w + x), torch.zeros_like(x))
    states[-1].sum().backward()
    assert states[-1].shape == (0, 3)
    assert len(stats.status) == 0
    assert w.grad is not None
    assert not w.grad.any()


def test_a_call_of_a_unit_that_fails_does_not_keep_later_solves_from_holding_it(group: Any) -> None:
    cell = make_unit(reshard_after_forward=True)
    x = torch.ones(2, WIDTH)
    cell.layers[1].forward = Mock(side_effect=ValueError("not this time"))
    with pytest.raises(ValueError, match="not this time"):
        fixed_point(lambda z: cell(z, x), x)
    assert units_inside([cell]) == (cell,)
    assert not UnitSettings(cell).gathered


def test_a_unit_around_the_solve_is_left_alone(group: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    net = make_net({"ift": True})
    fully_shard(net.layer)
    found: list[Any] = []

    def note_units(layer: Any, inputs: Any) -> None:
        found.append(find_peers(lambda z: layer.cell(z, z), None, torch.device("cpu")).units)

    net.layer.register_forward_pre_hook(note_units)
    net.layer.cell.register_forward_pre_hook(lambda *_: note_units(net.layer, None))
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    net.layer(x)
    assert found[0] in ((), (net.layer,))  # before or after the hook of the unit
    assert found[1:] == [()] * (len(found) - 1)


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm"])
def test_normalised_weights_are_computed_inside_the_sharded_forward(group: Any, kind: str) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    from torchdeq import apply_norm, reset_norm

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            apply_norm(self, kind)

        def forward(self, x: Tensor) -> Tensor:
            reset_norm(self)
            return self.linear(x)

    original, model = Normed().eval(), Normed().eval()
    expected = original(torch.ones(1, 3)).detach()
    fully_shard(model)
    whole = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, original.state_dict(), options=whole)
    with pytest.raises(RuntimeError, match="call reset_norm inside the forward pass"):
        reset_norm(model)
    torch.testing.assert_close(model(torch.ones(1, 3)).detach(), expected)


def test_units_inside_f_refuse_higher_orders(group: Any) -> None:
    cell, x = make_unit(), torch.ones(2, WIDTH)
    deq = get_deq(ift=True, higher_order=True)
    with pytest.raises(RuntimeError, match="call fully_shard on the module whose forward"):
        deq(lambda z: cell(z, x), x)


def test_announced_functions_and_modules_are_heard_by_every_solve_around_them() -> None:
    @collective
    def sum_over_processes(x: int) -> int:
        """Return a sum."""
        return x + 1

    @collective(group=lambda module, x: module.group)
    class Parallel(nn.Module):
        group = "mine"

        def forward(self, x: int) -> int:
            return x + 2

    outer, inner = Ear(), Ear()
    assert sum_over_processes(1) == 2  # nobody listens
    assert sum_over_processes.__doc__ == "Return a sum."
    with listening(outer):
        with listening(inner):
            assert sum_over_processes(1) == 2
        assert Parallel()(1) == 3
    assert inner.groups == [None]
    assert outer.groups == [None, "mine"]
    announce(None)
    assert len(outer.groups) == 2


@pytest.mark.parametrize("wrong", [int, nn.Linear(1, 1), 3])
def test_only_functions_and_classes_of_modules_can_be_announced(wrong: Any) -> None:
    with pytest.raises(TypeError, match="collective takes a function or a class of modules"):
        collective(wrong)


def test_collectives_of_two_groups_need_a_choice(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    listener = Peers(listens=True)
    listener.notice(None)
    listener.notice(group)  # the same group
    with pytest.raises(RuntimeError, match="several process groups"):
        listener.notice(dist.new_group())
    explicit = Peers(group=group)
    explicit.notice(dist.new_group())  # the program has chosen
    assert explicit.synchronised


@pytest.mark.parametrize("training", [True, False])
def test_synchronised_batch_normalisation_in_training_is_a_collective(
    group: Any, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    norm, other = nn.SyncBatchNorm(3).train(training), nn.SyncBatchNorm(3)
    monkeypatch.setattr(nn.SyncBatchNorm, "forward", lambda self, x: x)
    model = nn.ModuleDict({"norm": norm, "other": other})
    found = find_peers(lambda z: model["norm"](z), None, torch.device("cpu"))
    with found.forward():
        assert not found.synchronised
        norm(torch.ones(2, 3))
        assert found.synchronised is training
    assert not norm._forward_pre_hooks
    assert not other._forward_pre_hooks


@pytest.mark.parametrize(
    ("word", "value"),
    [("auto", None), ("world", "world"), ("true", "world"), ("False", False), (None, None)],
)
def test_the_flag_names_processes(word: Any, value: Any) -> None:
    assert parse_sync_stop(word) == value
    if isinstance(word, str):
        parser = argparse.ArgumentParser()
        add_deq_args(parser)
        assert parser.parse_args(["--sync_stop", word]).sync_stop == value
        assert DEQConfig({"sync_stop": word}).b_stop.sync_stop == value


def test_a_wrong_group_is_an_error(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"sync_stop must be .* pass mesh.get_group"):
        StopRule(sync_stop="word")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sync_stop: expected auto, world, false"):
        get_deq(sync_stop=3)
    monkeypatch.setattr(dist, "get_rank", lambda group: -1)
    with pytest.raises(ValueError, match="does not contain this process"):
        find_peers(abs, group, torch.device("cpu"))


def test_a_module_with_a_process_group_can_be_copied(group: Any) -> None:
    deq = get_deq(sync_stop=group, f_solver_kwargs={"tau": 0.5})
    copied = deepcopy(deq)
    assert copied.config == deq.config
    assert copied.config.f_stop.sync_stop is group
    assert copied.config.f_solver_kwargs is not deq.config.f_solver_kwargs
