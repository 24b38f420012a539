"""The modules that a callable reaches, and snapshots of their tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchdeq import mem_gc
from torchdeq.modules import ModuleState
from torchdeq.reach import reachable_parameters, scripted

GLOBAL = nn.Linear(2, 2)
NAMESPACE = SimpleNamespace(net=nn.Linear(2, 2))


def uses_a_global(z: Tensor) -> Tensor:
    return GLOBAL(z)


def scriptable(z: Tensor) -> Tensor:
    return z + 1


@dataclass
class Holder:
    net: nn.Module

    def step(self, z: Tensor) -> Tensor:
        return self.net(z)


@dataclass(slots=True)
class Slotted:
    net: nn.Module

    def __call__(self, z: Tensor) -> Tensor:
        return self.net(z)


class Hidden(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.others = [net]  # in a list: not a submodule

    def forward(self, z: Tensor) -> Tensor:
        return self.others[0](z)


def closure(net: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda z: net(z)


def default(net: nn.Module) -> Callable[..., Tensor]:
    def f(z: Tensor, layer: nn.Module = net) -> Tensor:
        return layer(z)

    return f


def keyword_default(net: nn.Module) -> Callable[..., Tensor]:
    def f(z: Tensor, *, layer: nn.Module = net) -> Tensor:
        return layer(z)

    return f


def in_containers(net: nn.Module) -> Callable[[Tensor], Tensor]:
    layers = {"deep": [(net,)]}
    return lambda z: layers["deep"][0][0](z)


def wrapped(net: nn.Module) -> Callable[..., Tensor]:
    @functools.wraps(net.forward)
    def f(*args: Any) -> Tensor:
        return functools.partial(lambda layer, *a: layer(*a), net)(*args)

    return f


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "the module": lambda net: net,
    "a method of it": lambda net: net.forward,
    "a closure": closure,
    "a closure in a closure": lambda net: closure(closure(net)),  # type: ignore[arg-type]
    "a default": default,
    "a keyword's default": keyword_default,
    "containers": in_containers,
    "a partial": lambda net: functools.partial(lambda layer, z: layer(z), net),
    "a partial's keyword": lambda net: functools.partial(lambda z, layer: layer(z), layer=net),
    "a method of a dataclass": lambda net: Holder(net).step,
    "a callable object with slots": Slotted,
    "an object in a closure": lambda net: (lambda h: lambda z: h.step(z))(Holder(net)),
    "a module's list": Hidden,
    "a wrapper": wrapped,
    "a cache": lambda net: functools.lru_cache(closure(net)),
    "a compiled function": lambda net: torch.compile(closure(net), backend="eager"),
    "a vectorised function": lambda net: torch.func.vmap(closure(net)),
}


@pytest.mark.parametrize("way", WAYS)
def test_parameters_are_reached_through(way: str) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    f = WAYS[way](net)
    reached = reachable_parameters(f)
    assert {id(p) for p in reached.values()} == {id(p) for p in net.parameters()}
    assert any(name.endswith("0.weight") for name in reached)


def test_a_name_is_the_path_to_a_parameter() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    assert list(reachable_parameters(net)) == ["0.weight", "0.bias"]
    assert list(reachable_parameters(closure(net))) == ["net.0.weight", "net.0.bias"]
    assert list(reachable_parameters(Holder(net).step)) == ["net.0.weight", "net.0.bias"]
    pair = (closure(nn.Linear(2, 2)), closure(nn.Linear(2, 2)))
    assert len(reachable_parameters(lambda z: pair[0](z) + pair[1](z))) == 4


def test_globals_that_a_function_names_are_reached_and_no_others() -> None:
    assert list(reachable_parameters(uses_a_global)) == ["GLOBAL.weight", "GLOBAL.bias"]
    assert next(iter(reachable_parameters(lambda z: uses_a_global(z)))).endswith("GLOBAL.weight")
    inside = reachable_parameters(lambda z: [NAMESPACE.net(t) for t in z])
    assert {id(p) for p in inside.values()} == {id(p) for p in NAMESPACE.net.parameters()}
    assert reachable_parameters(lambda z: z.GLOBAL) == {}  # an attribute of that name


def test_what_functional_call_puts_in_place_of_a_parameter_counts() -> None:
    net = nn.Linear(2, 2)
    other = {"weight": torch.ones(2, 2, requires_grad=True)}
    seen: list[dict[str, Tensor]] = []
    net.register_forward_pre_hook(lambda *_: seen.append(reachable_parameters(net)))
    torch.func.functional_call(net, other, torch.ones(1, 2))
    assert seen[0]["weight"] is other["weight"]
    assert reachable_parameters(net)["weight"] is net.weight


def test_a_shared_parameter_comes_once() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    assert list(reachable_parameters(net)) == ["0.weight", "0.bias", "1.bias"]


def test_the_search_ends_and_calls_nothing() -> None:
    class Odd:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"looked up {name}")

        @property
        def net(self) -> Any:
            raise AssertionError("called a property")

    ring: list[Any] = [Odd()]
    ring.append(ring)
    many, net = list(range(100_000)), nn.Linear(2, 2)
    reached = reachable_parameters(lambda z: (ring, many, net(z)))
    assert list(reached) == ["net.weight", "net.bias"]
    unassigned = SimpleNamespace()

    def late(z: Tensor) -> Tensor:
        return later(z)

    assert reachable_parameters(late) == {}
    later = closure(net)
    assert len(reachable_parameters(late)) == 2
    assert reachable_parameters(unassigned) == {}


@pytest.mark.parametrize("way", ["the module", "a closure", "a method of a dataclass"])
def test_scripted_modules_are_recognised(way: str) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert not scripted(WAYS[way](net))
    compiled = torch.jit.script(net)
    assert scripted(WAYS[way](compiled))
    assert scripted(WAYS[way](nn.Sequential(compiled)))
    function = torch.jit.script(scriptable)
    assert scripted(function)
    assert scripted(lambda z: function(z))
    assert scripted(torch.jit.trace(net.eval(), torch.ones(3, 2)))
    assert len(reachable_parameters(WAYS[way](compiled))) == 4


@pytest.mark.parametrize("script", [False, True])
@pytest.mark.parametrize("way", ["the module", "containers", "a method of a dataclass"])
def test_recomputation_counts_a_batch_once(way: str, script: bool) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    x = torch.randn(5, 2, requires_grad=True)
    f = WAYS[way](torch.jit.script(net) if script else net)
    y = mem_gc(f, (x,))
    once = {k: v.clone() for k, v in net.state_dict().items()}
    y.square().sum().backward()
    assert once["1.num_batches_tracked"] == 1
    torch.testing.assert_close(dict(net.state_dict()), once, rtol=0, atol=0)


def test_blocks_of_two_threads_leave_the_module_as_it_was() -> None:
    net = nn.BatchNorm1d(2)
    state, mean, weight = ModuleState(net), net.running_mean, net.weight
    first, second = state.restored("none", detached=True), state.restored("copied")
    first.__enter__()
    second.__enter__()  # as another thread may do meanwhile
    first.__exit__(None, None, None)
    assert net.running_mean is not mean
    assert net.running_mean is not None
    second.__exit__(None, None, None)
    assert net.running_mean is mean
    assert net._parameters["weight"] is weight

    def often() -> None:
        for _ in range(200):
            with state.restored("none", detached=True):
                pass

    threads = [Thread(target=often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert net.running_mean is mean
    assert net._parameters["weight"] is weight
