"""Options of DEQ modules: given when a module is built, for one call, or set on the module."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import torchdeq
from tests import problems
from tests.layers import BUILT_IN, Layer
from torchdeq import DEQConfig, StopRule, get_deq, get_solver
from torchdeq.core import DEQSliced
from torchdeq.solver import SOLVERS, SolverStat


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
    with pytest.raises(ValueError, match=r"pass f_max_iter once.*got both, \[5, 3\]"):
        deq(layer, layer.z0, solver_kwargs={"f_max_iter": 3}, f_max_iter=5)
    with pytest.raises(TypeError, match=r"pass f_tol to get_deq.* deq\.f_tol = "):
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


def results(deq: Any, layer: Layer) -> list[Tensor]:
    """Return the results of a training call: states, gradients, evaluations and products."""
    layer.zero_grad()
    products: list[Tensor] = []

    def writer(stats: SolverStat) -> None:
        products.extend((stats["nstep"], torch.tensor(stats.nfe)))

    states, info = deq(layer, layer.z0, backward_writer=writer)
    sum(((k + 1) * z.square()).sum() for k, z in enumerate(states)).backward()
    return [*states, layer.W.grad, torch.tensor(info.nfe), *products]


SHINE = {"ift": True, "f_solver": "broyden", "b_solver": "broyden"}
#: Options that change the results of a training call, with a value and the options around it.
SETTINGS: list[tuple[str, Any, dict[str, Any]]] = [
    ("f_solver", "anderson", {}), ("f_solver", "broyden", {}),
    ("b_solver", "gmres", {"ift": True}), ("f_max_iter", 7, {}),
    ("b_max_iter", 2, {"ift": True}), ("f_tol", 1e-2, {}), ("b_tol", 1e-1, {"ift": True}),
    ("f_stop_mode", "rel", {"f_tol": 0.1}),
    ("b_stop_mode", "rel", {"ift": True, "b_tol": 0.06}),  # |u| is near |g|
    ("f_stop_norm", "rms", {"f_tol": 0.1}), ("b_init", "shine", SHINE),
    ("f_rtol", 0.1, {"f_tol": None}), ("f_atol", 0.1, {"f_tol": None}),
    ("b_rtol", 0.1, {"ift": True, "b_tol": None}),
    ("b_atol", 0.1, {"ift": True, "b_tol": None}),
    ("f_check_every", 7, {"f_tol": 0.1}),
    ("b_check_every", 7, {"ift": True, "b_tol": 0.1}),
    ("f_solver_kwargs", {"tau": 0.5}, {}),
    ("b_solver_kwargs", {"tau": 0.5}, {"ift": True, "b_max_iter": 6}),
    ("backward", "ift", {}), ("ift", True, {}), ("hook_ift", True, {}), ("n_states", 3, {}),
    ("indexing", [3, 6], {}), ("grad", 3, {}), ("grad", [2], {}), ("tau", 0.5, {}),
    ("sup_gap", 1, {"grad": 2}), ("sup_loc", [1], {"grad": 2}),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::torchdeq.ConvergenceWarning")
@pytest.mark.parametrize(("name", "value", "others"), SETTINGS)
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
    changed, expected, before = (results(d, layer) for d in (deq, built, plain))
    torch.testing.assert_close(changed, expected, rtol=0, atol=0)
    assert len(changed) != len(before) or not all(map(torch.equal, changed, before))
    for twin in (copy.deepcopy(deq), pickle.loads(pickle.dumps(deq))):
        torch.testing.assert_close(results(twin, layer), expected, rtol=0, atol=0)


def test_higher_order_that_is_set_on_a_module_makes_gradients_differentiable() -> None:
    layer = Layer()
    deq = get_deq(ift=True)
    deq.higher_order = True
    (g,) = torch.autograd.grad(deq(layer, layer.z0)[0][-1].sum(), layer.W, create_graph=True)
    assert torch.autograd.grad(g.square().sum(), layer.W)[0].abs().sum() > 0


def test_every_option_acts_on_a_module_or_raises() -> None:
    other_tests = {"eval_factor", "eval_f_max_iter", "on_failure", "sradius_mode", "coupled",
                   "higher_order", "sync_stop", "compile_f"}  # fmt: skip
    raising = {"norm_type", "norm_no_scale", "norm_clip", "norm_clip_value", "norm_target_norm",
               "sn_n_power_iters", "core", "gamma", "jac_loss_weight", "jac_loss_freq",
               "jac_incremental"}  # fmt: skip
    tested = {name for name, _, _ in SETTINGS}
    assert tested | other_tests | raising == set(DEQConfig.names())
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
    deq.mine = 3  # an attribute of the program: no option has this name
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
        solution = torchdeq.solve(f, z0, SOLVERS[name](), stop)
        assert torch.equal(z, solution.z)
        assert stats.nfe == solution.stats.nfe < 60
        assert stats.converged.all()


def test_coupling_is_handed_to_the_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, received = Layer(), list[Any]()

    def spy(*args: Any, **kwargs: Any) -> Any:
        received.append(kwargs["coupled"])
        return torchdeq.fixed_point(*args, **kwargs)

    monkeypatch.setattr("torchdeq.forward_pass.fixed_point", spy)
    deq = get_deq()
    for value in (None, True, False, "adjoint"):
        deq.coupled = value
        deq.train()(layer, layer.z0)
        deq.eval()(layer, layer.z0)
    assert received == [None, None, True, True, False, False, "adjoint", "adjoint"]
    with pytest.raises(ValueError, match="compact=True lets finished samples leave"):
        deq(layer, layer.z0, compact=True)


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


def test_numbers_of_numpy_are_numbers() -> None:
    layer = Layer(0.99)
    deq = get_deq(f_max_iter=np.int64(5), f_tol=np.float32(0.0))
    assert deq(layer, layer.z0)[1].nfe == 5
    assert deq(layer, layer.z0, f_max_iter=np.int32(3))[1].nfe == 3
