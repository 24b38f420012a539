"""DEQ modules: which states come out, with which gradients, in training and evaluation."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchdeq
from tests import problems
from tests.layers import BUILT_IN, DOUBLE, Layer
from torchdeq import get_deq, get_solver, reset_deq
from torchdeq.core import DEQIndexing, DEQSliced
from torchdeq.dropout import VariationalDropout
from torchdeq.solver import SolverStat
from torchdeq.solver.anderson import anderson_solver


@pytest.mark.parametrize("core", BUILT_IN)
def test_training_returns_the_sampled_states_and_evaluation_one(core: str) -> None:
    layer = Layer()
    for options, count in (
        ({}, 1), ({"n_states": 4}, 4), ({"indexing": [3, 9]}, 3),
        ({"n_states": 2, "indexing": [3, 9]}, 2), ({"n_states": 2, "grad": [1, 3]}, 2),
        ({"grad": 4, "sup_gap": 2}, 2), ({"grad": 4, "sup_loc": [1]}, 2),
        ({"n_states": 3, "ift": True}, 3),
    ):  # fmt: skip
        deq = get_deq(core=core, f_max_iter=12, f_tol=0.0, **options)
        states, info = deq(layer, layer.z0)
        assert len(states) == count
        assert all(z.requires_grad for z in states)
        assert isinstance(info, SolverStat)
        states, _ = deq.eval()(layer, layer.z0)
        assert len(states) == 1


@pytest.mark.parametrize(
    ("budget", "n", "expected"),
    [(12, 3, [4, 8, 12]), (10, 3, [4, 7, 10]), (5, 5, [1, 2, 3, 4, 5]), (0, 3, [0]), (7, 1, [7])],
)
def test_the_indexing_core_spaces_states_evenly(budget: int, n: int, expected: list[int]) -> None:
    assert DEQIndexing(n_states=n).sampled_steps(budget) == expected


@pytest.mark.parametrize("core", BUILT_IN)
def test_more_states_than_evaluations_are_refused(core: str) -> None:
    layer = Layer()
    with pytest.raises(ValueError, match=r"more states than evaluations: n_states=8 .* of 4"):
        get_deq(core=core, n_states=8, f_max_iter=4)
    deq = get_deq(core=core, n_states=4, f_max_iter=8, f_tol=0.0)
    for call in ({"f_max_iter": 3}, {"solver_kwargs": {"f_max_iter": 3}}):
        with pytest.raises(ValueError, match="more states than evaluations"):
            deq(layer, layer.z0, **call)
        with torch.no_grad():
            assert len(deq.eval()(layer, layer.z0, **call)[0]) == 1
        deq.train()
    with pytest.raises(ValueError, match="more states than evaluations"):
        deq.f_max_iter = 3
    assert deq.f_max_iter == 8  # a refused value leaves the module as it was
    layer.calls = 0
    states, _ = deq(layer, layer.z0, f_max_iter=4)
    assert (len(states), layer.calls) == (4, 8)
    states, _ = get_deq(core=core, n_states=4, f_max_iter=0, grad=2)(layer, layer.z0)  # BPTT
    assert len(states) == (4 if core == "sliced" else 1)


@pytest.mark.parametrize("core", BUILT_IN)
@pytest.mark.parametrize("grad", [1, [2, 3], [1, 2, 3]])
def test_a_state_at_the_end_of_the_solve_counts_once(core: str, grad: Any) -> None:
    layer = Layer()
    deq = get_deq(core=core, indexing=[4, 9], f_max_iter=9, f_tol=0.0, grad=grad)
    states, info = deq(layer, layer.z0)
    assert (len(states), info.nfe) == (2, 9)
    first, last = (grad, grad) if isinstance(grad, int) else grad[-2:]
    steps = [4 + first, 9 + last] if core == "indexing" else [4 + first, 9 + first + last]
    for z, k in zip(states, steps, strict=True):
        torch.testing.assert_close(z, layer.iterate(k))
    if grad != [2, 3]:
        states, _ = deq(layer, layer.z0, f_max_iter=12)  # now 4 and 9 lie on the way
        assert len(states) == 3


def test_the_indexing_core_samples_one_solve() -> None:
    layer = Layer()
    deq = get_deq(core="indexing", indexing=[2, 5], f_max_iter=9, f_tol=0.0, grad=1)
    states, info = deq(layer, layer.z0)
    assert info.nfe == 9
    assert layer.calls == 12  # nine of the solve, one phantom step for each state
    for z, steps in zip(states, (2, 5, 9), strict=True):
        torch.testing.assert_close(z, layer.iterate(steps + 1))


def test_the_sliced_core_goes_on_from_the_gradient_steps() -> None:
    layer = Layer()
    deq = DEQSliced(n_states=3, f_max_iter=10, f_tol=0.0, grad=[1, 2, 1])
    assert deq.slices(10) == [3, 3, 3]
    states, info = deq(layer, layer.z0)
    assert info.nfe == 9
    for z, steps in zip(states, (4, 9, 13), strict=True):
        torch.testing.assert_close(z, layer.iterate(steps))
    assert DEQSliced(indexing=[20, 30]).slices(40) == [20, 10, 10]
    assert DEQSliced(indexing=[20, 30]).slices(25) == [20, 5, 0]
    # No gradient across slices: that of the second state is the gradient of its own two steps.
    (got,) = torch.autograd.grad(states[1].sum(), layer.W)
    z = layer.iterate(7).detach()
    (expected,) = torch.autograd.grad(layer(layer(z)).sum(), layer.W)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("core", BUILT_IN)
def test_implicit_differentiation_is_for_the_last_state(core: str) -> None:
    layer = Layer()
    deq = get_deq(core=core, n_states=3, ift=True, f_max_iter=90, f_tol=1e-13, b_max_iter=99,
                  b_tol=1e-13)  # fmt: skip
    states, _ = deq(layer, layer.z0)
    (exact,) = torch.autograd.grad(layer.iterate(100).sum(), layer.W)
    (last,) = torch.autograd.grad(states[-1].sum(), layer.W)
    (first,) = torch.autograd.grad(states[0].sum(), layer.W)
    torch.testing.assert_close(last, exact, rtol=0, atol=1e-9)
    assert (first - exact).abs().max() > 1e-3


def test_backpropagation_through_time_calls_f_exactly_as_often_as_it_says() -> None:
    layer = Layer()
    deq = get_deq(f_max_iter=0, grad=12)
    states, info = deq(layer, layer.z0)
    assert layer.calls == 12
    assert info.nfe == 0
    got, expected = (
        torch.autograd.grad(z.sum(), layer.W)[0] for z in (states[-1], layer.iterate(12))
    )
    torch.testing.assert_close(got, expected)
    layer.calls = 0
    with torch.no_grad():
        evaluated, _ = deq.eval()(layer, layer.z0)
    assert layer.calls == 12
    assert torch.equal(evaluated[-1], states[-1])


@pytest.mark.parametrize("options", [{"ift": True}, {"grad": 5, "tau": 0.5}, {"higher_order": True,
                                     "ift": True}, {"backward": "reversible"}])  # fmt: skip
def test_evaluation_is_the_same_with_and_without_grad_mode(options: dict[str, Any]) -> None:
    layer = Layer()
    deq = get_deq(f_max_iter=30, on_failure="ignore", **options).eval()
    with torch.no_grad():
        (without_graph,), info = deq(layer, layer.z0)
        assert layer.calls == info.nfe <= 30
    (attached,), _ = deq(layer, layer.z0)
    assert torch.equal(without_graph, attached)
    (grad,) = torch.autograd.grad(attached.sum(), layer.W)
    assert grad.abs().sum() > 0


def test_states_have_the_structure_of_the_start() -> None:
    def pair(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cos(b), 0.5 * a

    a, b = torch.zeros(2, 3), torch.zeros(2, 3)
    for deq in (get_deq(), get_deq().eval()):
        (state,), _ = deq(pair, (a, b))
        assert type(state) is list
        (state,), _ = deq(pair, [a, b])
        assert type(state) is list
        (state,), _ = deq(lambda z: {"b": 0.5 * z["b"]}, {"b": b})
        assert set(state) == {"b"}
        (state,), _ = deq(lambda z: 0.5 * z, a)
        assert state.shape == (2, 3)


def test_a_former_fixed_point_is_a_good_start() -> None:
    layer = Layer()
    deq = get_deq(f_tol=1e-8, f_max_iter=60)
    (z,), cold = deq(layer, layer.z0)
    _, warm = deq(layer, z.detach())
    assert warm.nfe < cold.nfe / 4


def test_the_backward_writer_is_called_once_with_statistics() -> None:
    layer = Layer()
    seen: list[SolverStat] = []
    deq = get_deq(ift=True, b_solver="gmres", n_states=3)
    states, _ = deq(layer, layer.z0, backward_writer=seen.append)
    sum(z.sum() for z in states).backward()
    assert len(seen) == 1
    assert seen[0].converged.all()


def test_the_spectral_radius_of_a_rotation_is_right() -> None:
    A = problems.rotation(0.9, 8)
    deq = get_deq(f_max_iter=200).eval()
    z0 = torch.zeros(2, 8, dtype=DOUBLE)
    _, info = deq(lambda z: z @ A.mT + 1, z0, sradius_mode=True)
    torch.testing.assert_close(info["sradius"], torch.full((2,), 0.9, dtype=DOUBLE))
    _, info = deq(lambda z: 0.5 * z, z0)
    assert (info["sradius"] == -1).all()
    _, info = get_deq(sradius_mode=True).eval()(lambda z: torch.ones_like(z), z0)
    assert (info["sradius"] == 0).all()


def test_modules_copy_pickle_and_describe_themselves() -> None:
    layer = Layer()
    deq = get_deq(f_solver="anderson", ift=True, f_max_iter=30)
    assert repr(deq) == "DEQSliced(f_solver='anderson', f_max_iter=30, ift=True)"
    (expected,), _ = deq(layer, layer.z0)
    for twin in (copy.deepcopy(deq), pickle.loads(pickle.dumps(deq))):
        (got,), _ = twin(layer, layer.z0)
        assert torch.equal(got, expected)
    assert not list(deq.parameters())
    assert not deq.state_dict()


def test_solver_functions_pickle_as_their_names() -> None:
    assert pickle.loads(pickle.dumps(anderson_solver)) is anderson_solver
    assert copy.deepcopy(get_solver("broyden")) is get_solver("broyden")


def test_reset_draws_new_masks() -> None:
    drop = nn.Sequential(VariationalDropout(0.5))
    x = torch.ones(4, 64)
    first = drop(x)
    assert torch.equal(drop(x), first)
    reset_deq(drop)
    assert not torch.equal(drop(x), first)


def test_the_last_state_instead_of_the_best() -> None:
    layer = Layer()
    deq = get_deq(f_max_iter=6, f_tol=0.5).eval()
    with torch.no_grad():
        (best,), _ = deq(layer, layer.z0)
        (final,), info = deq(layer, layer.z0, solver_kwargs={"return_final": True})
    assert info.nfe == 6
    torch.testing.assert_close(final, layer.iterate(6))
    assert not torch.equal(best, final)


def test_published_modules_are_attributes_of_the_package() -> None:
    for path in ("core.DEQBase", "utils.mem.mem_gc", "utils.config.DEQConfig", "solver.stat",
                 "norm.weight_norm.WeightNorm", "norm.spectral_norm.SpectralNorm",
                 "grad.backward_factory", "loss.fp_correction", "dropout.reset_dropout",
                 "solver.anderson.anderson_solver", "solver.fp_iter.fixed_point_iter"):  # fmt: skip
        value: Any = torchdeq
        for name in path.split("."):
            value = getattr(value, name)


@pytest.mark.parametrize("training", [True, False])
def test_the_auxiliary_output_of_the_last_state_comes_back(training: bool) -> None:
    layer = Layer()

    def f(z: Tensor) -> tuple[Tensor, Tensor]:
        return layer(z), z.square().sum(1)

    deq = get_deq(f_max_iter=30, f_tol=1e-9, on_failure="ignore").train(training)
    states, stats, aux = deq(f, layer.z0, has_aux=True)
    torch.testing.assert_close(aux, states[-1].square().sum(1))
    assert stats.nfe <= 30
    assert aux.requires_grad
