"""DEQ modules: which states come out, with which gradients, in training and evaluation."""

from __future__ import annotations

import argparse
import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchdeq
from tests import problems
from torchdeq import (
    DEQConfig,
    StopRule,
    get_deq,
    get_solver,
    register_deq,
    register_solver,
    reset_deq,
)
from torchdeq.core import DEQBase, DEQIndexing, DEQSliced, ForwardPass
from torchdeq.deq import CORES, Output
from torchdeq.dropout import VariationalDropout
from torchdeq.solver import SOLVERS, SolverStat

DOUBLE = torch.float64
BUILT_IN = ["indexing", "sliced"]


class Layer(nn.Module):
    """``tanh(W z + x)``, counting its calls."""

    def __init__(self, gain: float = 0.6) -> None:
        super().__init__()
        self.W = nn.Parameter(problems.contraction(gain, 6))
        self.x = torch.randn(3, 6, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
        self.z0 = torch.zeros(3, 6, dtype=DOUBLE)
        self.calls = 0

    def forward(self, z: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(z @ self.W.mT + self.x)

    def iterate(self, steps: int) -> Tensor:
        z = self.z0
        for _ in range(steps):
            z = torch.tanh(z @ self.W.mT + self.x)
        return z


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
    # No gradient across slices: the second state knows its own two steps only.
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
        (quiet,), info = deq(layer, layer.z0)
        assert layer.calls == info.nfe <= 30
    (attached,), _ = deq(layer, layer.z0)
    assert torch.equal(quiet, attached)
    (grad,) = torch.autograd.grad(attached.sum(), layer.W)
    assert grad.abs().sum() > 0


def test_budgets_of_evaluation() -> None:
    layer = Layer(0.99)

    def spent(**options: Any) -> int:
        deq = get_deq(f_tol=0.0, **options).eval()
        with torch.no_grad():
            return int(deq(layer, layer.z0)[1].nfe)

    assert spent(f_max_iter=10) == 10
    assert spent(f_max_iter=10, eval_factor=1.5) == 15
    assert spent(f_max_iter=10, eval_factor=1.5, eval_f_max_iter=7) == 7


@pytest.mark.parametrize("core", BUILT_IN)
@pytest.mark.parametrize("training", [True, False])
def test_a_call_may_have_its_own_budget_and_solver_options(core: str, training: bool) -> None:
    layer = Layer(0.99)
    deq = get_deq(core=core, f_solver="anderson", f_tol=0.0, n_states=2).train(training)
    for how in ({"solver_kwargs": {"f_max_iter": 6, "m": 3, "tau": 0.8}}, {"f_max_iter": 6}):
        _, info = deq(layer, layer.z0, **how)
        assert info.nfe == 6
    with pytest.raises(TypeError, match="solver 'anderson' has no option 'l_thres'"):
        deq(layer, layer.z0, solver_kwargs={"l_thres": 3})
    with pytest.raises(ValueError, match=r"whole number >= 0, got 2\.5"):
        deq(layer, layer.z0, f_max_iter=2.5)
    with pytest.raises(ValueError, match=r"must be given once, got \[5, 3\]"):
        deq(layer, layer.z0, solver_kwargs={"f_max_iter": 3}, f_max_iter=5)
    with pytest.raises(TypeError, match=r"set f_tol when .* deq\.f_tol = "):
        deq(layer, layer.z0, solver_kwargs={"tol": 1e-3})
    options = {"f_max_iter": 4}
    deq(layer, layer.z0, solver_kwargs=options)
    assert options == {"f_max_iter": 4}


def test_budgets_and_tolerances_can_be_changed_on_the_module() -> None:
    layer = Layer(0.99)
    deq = get_deq(f_tol=0.0, f_max_iter=5)
    deq.f_max_iter = 8
    assert deq(layer, layer.z0)[1].nfe == 8
    deq.f_tol = 1e-2
    deq.f_max_iter = 200
    assert deq(layer, layer.z0)[1].nfe < 200
    deq.eval_f_max_iter, deq.f_tol = 3, 0.0
    assert deq.eval()(layer, layer.z0)[1].nfe == 3


def differing(deq: Any, layer: Layer) -> list[Tensor]:
    """What a training call returns: states, gradients, evaluations and products."""
    layer.zero_grad()
    products: list[Tensor] = []
    states, info = deq(layer, layer.z0, backward_writer=lambda s: products.append(s["nstep"]))
    sum(((k + 1) * z.square()).sum() for k, z in enumerate(states)).backward()
    return [*states, layer.W.grad, torch.tensor(info.nfe), *products]


@pytest.mark.filterwarnings("ignore::torchdeq.ConvergenceWarning")
@pytest.mark.parametrize(
    ("name", "value", "others"),
    [
        ("f_solver", "anderson", {}), ("f_solver", "broyden", {}),
        ("b_solver", "gmres", {"ift": True}), ("f_max_iter", 7, {}),
        ("b_max_iter", 2, {"ift": True}), ("f_tol", 1e-2, {}), ("b_tol", 1e-1, {"ift": True}),
        ("f_stop_mode", "rel", {"f_tol": 0.1}), ("b_stop_mode", "rel", {"ift": True}),
        ("f_rtol", 0.1, {"f_tol": None}), ("f_atol", 0.1, {"f_tol": None}),
        ("b_rtol", 0.1, {"ift": True, "b_tol": None}), ("f_check_every", 5, {"f_tol": 1e-2}),
        ("f_solver_kwargs", {"tau": 0.5}, {}),
        ("b_solver_kwargs", {"tau": 0.5}, {"ift": True, "b_max_iter": 6}),
        ("backward", "ift", {}), ("ift", True, {}), ("hook_ift", True, {}), ("n_states", 3, {}),
        ("indexing", [3, 6], {}), ("grad", 3, {}), ("grad", [2], {}), ("tau", 0.5, {}),
        ("sup_gap", 1, {"grad": 2}), ("sup_loc", [1], {"grad": 2}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("core", BUILT_IN)
def test_an_option_that_is_set_on_a_module_acts_as_if_it_was_built_with_it(
    core: str, name: str, value: Any, others: dict[str, Any]
) -> None:
    layer = Layer(0.9)
    options = {"core": core, "f_max_iter": 12, "f_tol": 0.0, **others}
    deq, plain = get_deq(**options), get_deq(**options)
    deq(layer, layer.z0)
    setattr(deq, name, value)
    built = get_deq(**{**options, name: value})
    assert repr(deq) == repr(built)
    assert getattr(deq.config, name) == getattr(built.config, name)
    changed, expected, before = (differing(d, layer) for d in (deq, built, plain))
    torch.testing.assert_close(changed, expected, rtol=0, atol=0)
    if name != "b_stop_mode":
        same = len(changed) == len(before) and all(map(torch.equal, changed, before))
        assert not same or name in ("f_check_every",)
    for twin in (copy.deepcopy(deq), pickle.loads(pickle.dumps(deq))):
        torch.testing.assert_close(differing(twin, layer), expected, rtol=0, atol=0)


def test_every_option_acts_on_a_module_or_raises() -> None:
    acting = {"f_solver", "b_solver", "eval_factor", "eval_f_max_iter", "on_failure", "coupled"}
    acting |= {"higher_order", "b_init", "sradius_mode", "f_stop_norm"}
    acting |= {"b_check_every", "b_atol"}
    raising = {"norm_type", "norm_no_scale", "norm_clip", "norm_clip_value", "norm_target_norm",
               "sn_n_power_iters", "core", "gamma", "jac_loss_weight", "jac_loss_freq",
               "jac_incremental"}  # fmt: skip
    (mark,) = (
        m for m in test_an_option_that_is_set_on_a_module_acts_as_if_it_was_built_with_it.pytestmark
        if m.args[0] == ("name", "value", "others")
    )  # fmt: skip
    tested = {case[0] for case in mark.args[1]}
    assert tested | acting | raising == set(DEQConfig.names())
    deq = get_deq(tau=0.5)
    for name in raising:
        with pytest.raises(AttributeError, match=rf"option '{name}' cannot .* get_deq\("):
            setattr(deq, name, getattr(deq, name))
    assert deq.tau == deq.config.tau == 0.5
    with pytest.raises(ValueError, match=r"tau must lie in \(0, 1\], got 2.0"):
        deq.tau = 2.0
    with pytest.raises(KeyError, match="did you mean 'anderson'"):
        deq.f_solver = "andersen"
    with pytest.raises(TypeError, match="f_solver must be a name or a function, got 3"):
        deq.f_solver = 3  # type: ignore[assignment]
    with pytest.raises(TypeError, match="call register_solver first"):
        deq.b_solver = lambda f, x0: x0
    deq.b_solver = get_solver("anderson")
    assert deq.config.b_solver == "anderson"
    deq.f_solver = get_solver("broyden")
    assert deq.f_solver is get_solver("broyden")
    assert not hasattr(deq, "no_such_option")
    deq.mine = 3  # whatever is no option is the program's own
    assert deq.mine == 3


def test_evaluation_follows_options_that_are_set() -> None:
    layer = Layer(0.99)
    deq = get_deq(f_tol=0.0, f_max_iter=10).eval()
    with torch.no_grad():
        deq.eval_factor = 1.5
        assert deq(layer, layer.z0)[1].nfe == 15
        deq.eval_f_max_iter = 4
        assert deq(layer, layer.z0)[1].nfe == 4
    with pytest.raises(ValueError, match="whole number >= 0, got -1"):
        deq.eval_f_max_iter = -1
    deq.sradius_mode = True
    assert (deq(layer, layer.z0)[1]["sradius"] > 0).all()
    deq.f_tol, deq.on_failure = 1e-9, "raise"
    with pytest.raises(torchdeq.ConvergenceError, match="MAX_ITER 3"):
        deq(layer, layer.z0)


def test_a_core_with_a_forward_of_its_own_may_name_its_attributes_like_options() -> None:
    class Own(DEQBase):
        def __init__(self, args: Any = None, **kwargs: Any) -> None:
            super().__init__(args, **kwargs)
            self.indexing = [5, 5, 5]  # slices, as in 0.1.0: no value of the option
            self.gamma = "mine"
            self.tau = self.args.get("tau", 1.0)

        def forward(self, func: Any, z_init: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            return [self.tau * func(z_init)] * len(self.indexing), {}

    deq = Own(tau=0.5)
    deq.tau = 7.0
    states, _ = deq(torch.cos, torch.zeros(2))
    assert (deq.gamma, len(states)) == ("mine", 3)
    torch.testing.assert_close(states[0], torch.full((2,), 7.0))

    class Around(DEQSliced):
        def forward(self, func: Any, z_init: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            return super().forward(func, z_init, **kwargs)

    layer = Layer()
    around = Around(grad=3)
    around.tau = 0.5
    expected, _ = get_deq(grad=3, tau=0.5)(layer, layer.z0)
    torch.testing.assert_close(around(layer, layer.z0)[0], expected, rtol=0, atol=0)
    around.tau = 7.0
    with pytest.raises(ValueError, match="tau must lie"):
        around(layer, layer.z0)


@pytest.mark.parametrize("name", [name for name in SOLVERS if SOLVERS[name].watches])
def test_a_joint_tolerance_and_rare_checks_are_those_of_the_stop_rule(name: str) -> None:
    f, z0 = problems.tanh_layer(gain=0.9)
    for options, stop in (
        ({"f_rtol": 1e-3, "f_atol": 1e-4}, StopRule(60, None, rtol=1e-3, atol=1e-4)),
        ({"f_atol": 1e-2}, StopRule(60, None, rtol=0.0, atol=1e-2)),
        ({"f_tol": 1e-3, "f_check_every": 7}, StopRule(60, 1e-3, check_every=7)),
    ):
        deq = get_deq(f_solver=name, f_max_iter=60, **options).eval()
        with torch.no_grad():
            (z,), stats = deq(f, z0)
        found = torchdeq.solve(f, z0, SOLVERS[name](), stop)
        assert torch.equal(z, found.z)
        assert stats.nfe == found.stats.nfe < 60
        assert stats.converged.all()


def test_coupling_is_handed_to_the_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, given = Layer(), list[Any]()

    def watched(*args: Any, **kwargs: Any) -> Any:
        given.append(kwargs["coupled"])
        return torchdeq.fixed_point(*args, **kwargs)

    monkeypatch.setattr("torchdeq.forward_pass.fixed_point", watched)
    deq = get_deq()
    for value in (None, True, False, "adjoint"):
        deq.coupled = value
        deq.train()(layer, layer.z0)
        deq.eval()(layer, layer.z0)
    assert given == [None, None, True, True, False, False, "adjoint", "adjoint"]
    with pytest.raises(ValueError, match="compact=True lets finished samples leave"):
        deq(layer, layer.z0, compact=True)


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


def test_names_and_options_are_checked_when_the_module_is_built() -> None:
    with pytest.raises(KeyError, match="unknown core 'slices'; did you mean 'sliced'"):
        get_deq(core="slices")
    with pytest.raises(KeyError, match="unknown solver 'andersen'; did you mean 'anderson'"):
        get_deq(f_solver="andersen")
    with pytest.raises(KeyError, match="unknown solver 'gmres'"):
        get_deq(f_solver="gmres")
    with pytest.raises(KeyError, match="unknown backward solver 'gmre'; did you mean 'gmres'"):
        get_deq(ift=True, b_solver="gmre")
    with pytest.raises(TypeError, match="solver 'anderson' has no option 'mm'"):
        get_deq(f_solver="anderson", f_solver_kwargs={"mm": 3})
    with pytest.raises(TypeError, match="linear solver 'gmres' has no option 'm'"):
        get_deq(ift=True, b_solver="gmres", b_solver_kwargs={"m": 3})
    with pytest.raises(KeyError, match="unknown backward 'reversable'"):
        get_deq(backward="reversable")
    with pytest.raises(ValueError, match="sup_loc must lie within the 2 steps of grad"):
        get_deq(grad=2, sup_loc=[3])
    with pytest.raises(TypeError, match="unknown option 'stop_mode'"):
        get_deq(stop_mode="rel")
    layer = Layer()
    with pytest.raises(ValueError, match=r"one for each of the 3 states, got \[1, 2\]"):
        get_deq(n_states=3, grad=[1, 2])
    with pytest.raises(ValueError, match=r"one for each of the 1 states, got \[1, 2\]"):
        get_deq(grad=[1, 2])
    with pytest.raises(KeyError, match="did you mean 'anderson'"):
        get_deq(b_solver="andersen")
    with pytest.raises(ValueError, match="f_solver must be 'fixed_point_iter', got 'anderson'"):
        get_deq(backward="reversible", f_solver="anderson")
    with pytest.raises(TypeError, match="define train_states, or forward"):
        type("Old", (DEQSliced,), {"_compute_f_iter": lambda self, n: [n]})
    with pytest.raises(ValueError, match="use core='sliced'"):
        get_deq(core="indexing", n_states=2, backward="reversible")(layer, layer.z0)


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
    from torchdeq import get_solver
    from torchdeq.solver.anderson import anderson_solver

    assert pickle.loads(pickle.dumps(anderson_solver)) is anderson_solver
    assert copy.deepcopy(get_solver("broyden")) is get_solver("broyden")


def test_numbers_of_numpy_are_numbers() -> None:
    import numpy as np

    layer = Layer(0.99)
    deq = get_deq(f_max_iter=np.int64(5), f_tol=np.float32(0.0))
    assert deq(layer, layer.z0)[1].nfe == 5
    assert deq(layer, layer.z0, f_max_iter=np.int32(3))[1].nfe == 3


def test_reset_draws_new_masks() -> None:
    drop = nn.Sequential(VariationalDropout(0.5))
    x = torch.ones(4, 64)
    first = drop(x)
    assert torch.equal(drop(x), first)
    reset_deq(drop)
    assert not torch.equal(drop(x), first)


class TestRegistration:
    """A solver and a core of one's own, usable by name after the parser was built."""

    @pytest.fixture(autouse=True)
    def _clean(self) -> Any:
        yield
        for registry, name in ((SOLVERS, "halving"), (CORES, "mine"), (CORES, "old")):
            registry._entries.pop(name, None)

    def test_an_old_style_solver_function(self) -> None:
        def halving(func: Any, x0: Tensor, max_iter: int = 50, tol: float = 1e-3,
                    stop_mode: str = "abs", tau: float = 0.5, **kwargs: Any) -> Any:  # fmt: skip
            z = x0
            for _ in range(max_iter):
                z = tau * func(z) + (1 - tau) * z
            return z, [], {}

        register_solver("halving", halving)
        deq = get_deq(argparse.Namespace(f_solver="halving", f_max_iter=60, ift=True))
        assert deq.f_solver is halving
        layer = Layer()
        (z,), info = deq(layer, layer.z0, solver_kwargs={"tau": 0.7})
        assert info.nfe == 60
        torch.testing.assert_close(z, layer.iterate(100), rtol=0, atol=1e-6)

    def test_a_core_with_an_option_of_its_own(self) -> None:
        class Mine(DEQBase):
            def __init__(self, args: Any = None, extra_steps: int = 2, **options: Any) -> None:
                super().__init__(args, **options)
                self.extra_steps = extra_steps

            def train_states(self, call: ForwardPass, budget: int) -> Output:
                (backward,) = call.backwards(1)
                found = call.solve(call.z0, budget + self.extra_steps, backward)
                return found.states, found.stats

        register_deq("mine", Mine)
        layer = Layer(0.99)
        for deq in (
            get_deq(core="mine", extra_steps=5, f_tol=0.0, f_max_iter=4),
            get_deq({"core": "mine", "extra_steps": 5, "f_tol": 0.0, "f_max_iter": 4}),
            get_deq(argparse.Namespace(core="mine", extra_steps=5, f_tol=0.0, f_max_iter=4, lr=1)),
        ):
            assert deq(layer, layer.z0)[1].nfe == 9
        with pytest.raises(TypeError, match="unknown option 'extra_steps'"):
            get_deq(core="sliced", extra_steps=5)
        with pytest.raises(TypeError, match="a core is a class"):
            register_deq("other", lambda config: None)  # type: ignore[arg-type]

    def test_a_core_that_takes_any_keyword(self) -> None:
        class Open(DEQSliced):
            def __init__(self, args: Any = None, **kwargs: Any) -> None:
                super().__init__(args, **kwargs)
                self.own = self.args.get("own", 1)

        register_deq("mine", Open)
        assert get_deq(core="mine", own=4).own == 4
        assert get_deq({"core": "mine", "own": 4, "tau": 0.5}).own == 4
        with pytest.warns(UserWarning, match="'f_maxiter' is not an option"):
            get_deq(core="mine", f_maxiter=4)

    def test_a_core_written_for_0_1_0(self) -> None:
        from torchdeq.grad import backward_factory
        from torchdeq.utils.layer_utils import deq_decorator

        class Old(DEQBase):
            def __init__(self, args: Any = None, shift: int = 1, **kwargs: Any) -> None:
                super().__init__(args=args, **kwargs)
                self.shift = self.args.get("shift", shift)
                self.produce_grad = backward_factory(
                    grad_type="ift", b_solver=self.b_solver,
                    b_solver_kwargs={"max_iter": self.b_max_iter, "tol": self.b_tol,
                                     "stop_mode": self.b_stop_mode},
                )  # fmt: skip

            def _solve_fixed_point(self, deq_func: Any, z_init: Tensor, f_max_iter: int) -> Any:
                with torch.no_grad():
                    z_star, _, info = self.f_solver(
                        deq_func, x0=z_init, max_iter=f_max_iter, tol=self.f_tol,
                        stop_mode=self.f_stop_mode,
                    )  # fmt: skip
                return z_star, info

            def forward(self, func: Any, z_init: Any, **kwargs: Any) -> Any:  # type: ignore[override]
                deq_func, z = deq_decorator(func, z_init, no_stat=self.no_stat)
                z_star, info = self._solve_fixed_point(deq_func, z, self.f_max_iter + self.shift)
                out = self.produce_grad(self, deq_func, deq_func.detach(z_star))
                return [deq_func.vec2list(each) for each in out], info

        register_deq("old", Old)
        x = torch.randn(2, 3, dtype=DOUBLE, requires_grad=True)
        deq = get_deq(core="old", shift=2, f_solver="anderson", f_tol=1e-12, f_max_iter=80,
                      b_tol=1e-12, b_max_iter=80)  # fmt: skip

        def pair(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            return 0.5 * torch.cos(b) + x, 0.5 * torch.sin(a)

        zero = torch.zeros_like(x).detach()
        ((a, b),), _ = deq(pair, (zero, zero))
        reference = (zero, zero)
        for _ in range(100):
            reference = pair(*reference)
        torch.testing.assert_close((a, b), reference)
        got, expected = (torch.autograd.grad((u * v).sum(), x)[0] for u, v in ((a, b), reference))
        torch.testing.assert_close(got, expected)


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
    import torchdeq

    for path in ("core.DEQBase", "utils.mem.mem_gc", "utils.config.DEQConfig", "solver.stat",
                 "norm.weight_norm.WeightNorm", "norm.spectral_norm.SpectralNorm",
                 "grad.backward_factory", "loss.fp_correction", "dropout.reset_dropout",
                 "solver.anderson.anderson_solver", "solver.fp_iter.fixed_point_iter"):  # fmt: skip
        held: Any = torchdeq
        for name in path.split("."):
            held = getattr(held, name)


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
