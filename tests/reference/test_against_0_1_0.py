"""The same programs on torchdeq 0.1.0 and on ours: equal where 0.1.0 is right, and where it is not.

0.1.0 runs in a process of its own from `.bench/`, where it is installed at the first use; without
a package index the tests are skipped. Weights, inputs and seeds are the same in both processes.

States on the way to a fixed point are comparable with a tolerance of 0, which neither library
reaches: plain iteration everywhere; Anderson without regularisation (0.1.0's is absolute, ours
relative) from the third evaluation on; Broyden's in the indexing core, but not in slices, where
0.1.0 evaluates once more than the budget says. Everything else is compared at convergence.

Where 0.1.0 is wrong and ours differs (the tests named `test_fault_...`):

==============================  =====================================  =============================
program                         0.1.0                                  ours
==============================  =====================================  =============================
n_states with ift, early stop   one state, one-step gradient           all states, implicit gradient
loss scaled down                gradient of one step                   scales with the loss
b_solver simple iteration       TypeError                              works
tuple state, simple, ift        AttributeError                         works
second derivative of ift        wrong number                           error, or exact
gradient in evaluation          no graph                               exact
NaN in the last evaluation      NaN                                    best finite state
hard sample in the batch        changes its mates                      changes nothing
max_iter                        Broyden one more, Anderson at least 2  exactly evaluations of f
initialising a normed weight    undone by reset_norm                   kept
misspelt option, dict options   ignored, and the dict is written to    error, untouched
==============================  =====================================  =============================
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.reference import published
from tests.reference.published import Answer

pytestmark = [
    pytest.mark.slow,  # several seconds, and an installation at the first use
    pytest.mark.filterwarnings("ignore"),
]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".bench" / "torchdeq-0.1.0"
SOLVERS = ["fixed_point_iter", "simple_fixed_point_iter", "anderson", "broyden"]
TIGHT = {"f_max_iter": 120, "b_max_iter": 120, "f_tol": 1e-9, "b_tol": 1e-9}
BACKWARDS: dict[str, dict[str, Any]] = {
    "ift": {"ift": True, "b_solver": "anderson"},
    "hook_ift": {"hook_ift": True, "b_solver": "broyden"},
    "one step": {"grad": 1},
    "phantom": {"grad": [5], "tau": 0.6},
    "sup_gap": {"grad": 5, "sup_gap": 2},
    "sup_loc": {"grad": 5, "tau": 0.8, "sup_loc": [1, 3]},
}

Ask = Callable[..., Answer]


@pytest.fixture(scope="module")
def old() -> Iterator[Ask]:
    """Programs as torchdeq 0.1.0 runs them."""
    if not FOLDER.exists():
        _install()
    environment = {**os.environ, "PYTHONPATH": str(FOLDER), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", published.__file__, str(FOLDER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    to, back = process.stdin, process.stdout

    def ask(name: str, **options: Any) -> Answer:
        pickle.dump((name, options), to)
        to.flush()
        answer: Answer = pickle.load(back)
        return answer

    yield ask
    process.kill()
    process.communicate()


def _install() -> None:
    """Into a folder of its own first: two test processes may both find nothing."""
    FOLDER.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent, ignore_cleanup_errors=True) as part:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--retries", "1"]
        done = subprocess.run([*pip, "--target", f"{part}/new", "torchdeq==0.1.0"])
        if done.returncode:
            pytest.skip("torchdeq 0.1.0 is neither in .bench/ nor to be had from a package index")
        with suppress(OSError):  # the other process was faster
            Path(part, "new").rename(FOLDER)


def ours(name: str, **options: Any) -> Answer:
    """The same program here."""
    return published.answer(name, options)


def agree(old: Ask, name: str, *, tol: float = 1e-6, **options: Any) -> Answer:
    """Both answers, compared; returns ours."""
    theirs, mine = old(name, **options), ours(name, **options)
    assert "error" not in theirs, theirs
    assert "error" not in mine, mine
    torch.testing.assert_close(mine, theirs, atol=tol, rtol=tol)
    return mine


@pytest.mark.parametrize("state", ["tensor", "pair", "image"])
@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("core", ["indexing", "sliced"])
def test_training_gives_the_same_states_and_gradients(
    old: Ask, core: str, solver: str, backward: str, state: str
) -> None:
    if (solver, state) == ("simple_fixed_point_iter", "pair") and "ift" in backward:
        pytest.skip("0.1.0 fails: a fault below")
    options = {"core": core, "f_solver": solver, **TIGHT, **BACKWARDS[backward]}
    agree(old, "run_deq", options=options, state=state)


@pytest.mark.parametrize("b_solver", ["fixed_point_iter", "anderson", "broyden"])
@pytest.mark.parametrize("kind", ["ift", "hook_ift"])
def test_every_backward_solver_gives_the_same_gradient(old: Ask, kind: str, b_solver: str) -> None:
    options = {kind: True, "b_solver": b_solver, "b_stop_mode": "rel", **TIGHT}
    agree(old, "run_deq", options=options, state="pair")


@pytest.mark.parametrize("state", ["tensor", "pair"])
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("core", ["indexing", "sliced"])
@pytest.mark.parametrize(
    "budget",
    [
        {"f_max_iter": 0, "grad": 6, "tau": 0.8},
        {"f_max_iter": 0, "grad": 6, "sup_gap": 3},
        {"f_max_iter": 7, "grad": 4, "tau": 1.0},
        {"f_max_iter": 8, "n_states": 2, "grad": 2, "tau": 0.8},
        {"f_max_iter": 11, "n_states": 3, "grad": [3, 2, 1]},
        {"f_max_iter": 9, "indexing": [3, 6], "sup_loc": [1], "grad": 2},
        {"f_max_iter": 9, "indexing": [4], "ift": True, "b_tol": 1e-9, "b_max_iter": 80},
    ],
    ids=str,
)
def test_short_budgets_and_sampled_states_agree_before_convergence(
    old: Ask, budget: dict[str, Any], core: str, solver: str, state: str
) -> None:
    """Backpropagation through time, truncated or not, and states along the way."""
    if solver == "broyden" and core == "sliced" and budget["f_max_iter"]:
        pytest.skip("0.1.0 evaluates once more per slice")
    if solver == "anderson" and core == "sliced" and budget.get("n_states", 1) == 1:
        pytest.skip("a slice of less than three evaluations returns its start in 0.1.0")
    if solver == "simple_fixed_point_iter" and "ift" in budget and state == "pair":
        pytest.skip("0.1.0 fails: a fault below")
    if solver == "simple_fixed_point_iter" and core == "indexing" and not budget["f_max_iter"]:
        pytest.skip("0.1.0 returns no state at all")
    options = {"core": core, "f_solver": solver, "f_tol": 0.0, **budget}
    call = {"anderson": {"lam": 0.0}, "broyden": {"LBFGS_thres": 20}}.get(solver)
    # Implicit gradients are taken at z or at f(z): apart by the residual.
    tol = 1e-4 if "ift" in budget else 1e-9
    agree(old, "run_deq", options=options, state=state, call=call, tol=tol)


@pytest.mark.parametrize("state", ["tensor", "pair", "image"])
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("core", ["indexing", "sliced"])
def test_evaluation_gives_the_same_fixed_point(
    old: Ask, core: str, solver: str, state: str
) -> None:
    if (core, solver, state) == ("indexing", "simple_fixed_point_iter", "pair"):
        pytest.skip("0.1.0 looks for the device of the tuple, and fails")
    options = {"core": core, "f_solver": solver, **TIGHT, "n_states": 3, "grad": 2}
    mine = agree(old, "run_deq", options=options, state=state, training=False)
    assert len(mine["states"]) == (2 if state == "pair" else 1)


@pytest.mark.parametrize(
    "budget",
    [{"eval_factor": 1.5}, {"eval_factor": 0.4}, {"eval_f_max_iter": 3, "eval_factor": 2.0}],
    ids=str,
)
def test_evaluation_has_the_same_budget(old: Ask, budget: dict[str, Any]) -> None:
    options = {"f_max_iter": 5, "f_tol": 0.0, **budget}
    agree(old, "run_deq", options=options, training=False, tol=1e-12)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("solver", "call"),
    [
        ("fixed_point_iter", {"f_max_iter": 5}),
        ("fixed_point_iter", {"f_max_iter": 7, "tau": 0.6}),
        ("simple_fixed_point_iter", {"tau": 0.6}),
        ("anderson", {"f_max_iter": 6, "m": 3, "lam": 0.0}),
        ("anderson", {"f_max_iter": 90, "tau": 0.7}),  # at convergence: ours damps step 1 too
        ("broyden", {"f_max_iter": 90, "LBFGS_thres": 12}),
    ],
    ids=str,
)
def test_options_of_one_call_mean_the_same(
    old: Ask, solver: str, call: dict[str, Any], training: bool
) -> None:
    options = {"core": "indexing", "f_solver": solver, "f_max_iter": 8, "grad": 2}
    options["f_tol"] = 1e-9 if call.get("f_max_iter") == 90 else 0.0
    agree(old, "run_deq", options=options, call=call, training=training)


@pytest.mark.parametrize("shape", [(3, 4), (4,), (2, 3, 2), (1, 1)])
@pytest.mark.parametrize("mode", ["abs", "rel"])
def test_plain_iteration_reports_the_same_statistics(
    old: Ask, mode: str, shape: tuple[int, ...]
) -> None:
    """Without a tolerance: with one, 0.1.0 goes on with every sample until the last has met it."""
    options = {"max_iter": 9, "tol": 0.0, "stop_mode": mode, "indexing": [4, 9]}
    agree(old, "run_solver", solver="fixed_point_iter", options=options, shape=shape)


@pytest.mark.parametrize("name", ["anderson", "broyden"])
@pytest.mark.parametrize("shape", [(3, 4), (4,), (2, 3, 2)])
def test_solver_functions_find_the_same_point(old: Ask, name: str, shape: tuple[int, ...]) -> None:
    options = {"max_iter": 100, "tol": 1e-9}
    theirs = old("run_solver", solver=name, options=options, shape=shape)
    mine = ours("run_solver", solver=name, options=options, shape=shape)
    torch.testing.assert_close(mine["z"], theirs["z"], atol=1e-7, rtol=0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"learn_scale": False, "target_norm": 0.7},
        {"clip": True, "clip_value": 0.9},
        {"args": {"norm_no_scale": True, "norm_clip": True, "norm_target_norm": 0.4}},
    ],
    ids=str,
)
@pytest.mark.parametrize("norm_type", ["weight_norm", "spectral_norm"])
def test_normalised_models_train_alike_from_the_same_state(
    old: Ask, norm_type: str, options: dict[str, Any]
) -> None:
    """Outputs, gradients and buffers over several resets; the state is one 0.1.0 has saved."""
    options = {"norm_type": norm_type, **options}
    state = old("train_normed", options=dict(options), state=None, steps=0)["first"]
    theirs = old("train_normed", options=dict(options), state=state, steps=4)
    mine = ours("train_normed", options=dict(options), state=state, steps=4)
    assert "error" not in mine, mine
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("token_first", [True, False])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("VariationalDropout", (3, 5)),
        ("VariationalDropout1d", (3, 4, 5)),
        ("VariationalDropout2d", (3, 4, 2, 5)),
        ("VariationalDropout3d", (3, 2, 4, 2, 5)),
        ("VariationalDropToken1d", (3, 4, 5)),
        ("VariationalDropToken2d", (3, 4, 2, 5)),
        ("VariationalDropToken3d", (3, 2, 4, 2, 5)),
    ],
)
def test_seeds_give_the_same_dropout_masks(
    old: Ask, kind: str, shape: tuple[int, ...], token_first: bool
) -> None:
    options: dict[str, Any] = {"dropout": 0.3}
    if kind != "VariationalDropout":
        options["token_first"] = token_first
    agree(old, "draw_masks", kind=kind, options=options, shape=shape)


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize(
    ("weight_func", "options"),
    [("exp", {}), ("exp", {"gamma": 0.5}), ("linear", {}), ("linear", {"gamma": 0.4, "bias": 0.1})],
)
def test_corrections_weigh_the_same(
    old: Ask, n: int, weight_func: str, options: dict[str, Any]
) -> None:
    agree(old, "correct", n=n, weight_func=weight_func, options=options)


@pytest.mark.parametrize("vecs", [1, 3])
def test_seeds_give_the_same_jacobian_loss(old: Ask, vecs: int) -> None:
    agree(old, "regularise", vecs=vecs, tol=1e-5)


def test_seeds_give_the_same_mixed_start(old: Ask) -> None:
    agree(old, "draw_start", shape=(4, 5), tol=0)


def test_recomputation_gives_the_same_gradients(old: Ask) -> None:
    agree(old, "recompute", tol=1e-12)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--ift --f_solver anderson --b_solver broyden --f_max_iter 30 --f_tol 1e-4",
        "--core indexing --n_states 3 --grad 5 4 3 --tau 0.6 --sup_loc 1 2 --indexing 3 6",
        "--norm_type spectral_norm --norm_no_scale --norm_clip --sn_n_power_iters 3 --sup_gap 2",
    ],
)
def test_command_lines_parse_to_the_same_values(old: Ask, line: str) -> None:
    theirs, mine = (ask("parse", argv=line.split()) for ask in (old, ours))
    assert {key: mine[key] for key in theirs} == theirs


@pytest.mark.parametrize("f_solver", ["relaxation", "anderson"])
@pytest.mark.parametrize("ift", [True, False])
@pytest.mark.parametrize("state", ["tensor", "pair", "image"])
def test_solvers_cores_and_norms_written_for_0_1_0_run_unchanged(
    old: Ask, state: str, ift: bool, f_solver: str
) -> None:
    theirs, mine = (
        ask("run_client", state=state, ift=ift, f_solver=f_solver) for ask in (old, ours)
    )
    if f_solver == "anderson":  # ours needs fewer evaluations
        assert (mine.pop("nstep") <= theirs.pop("nstep")).all()
    torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)


RANDOM = [("random", seed, 0.5 + 0.1 * seed) for seed in range(20)]
PROGRAMS = [(kind, 0, None) for kind in ("mdeq", "lm", "flow", "inr", "ignn", "ddim")]


@pytest.mark.parametrize("steps", [6, 18, 40])
@pytest.mark.parametrize(("kind", "seed", "gain"), [*PROGRAMS, *RANDOM])
def test_broyden_by_its_name_alone_is_as_good_as_published(
    old: Ask, kind: str, seed: int, gain: float | None, steps: int
) -> None:
    """0.1.0 counts steps: the evaluation at the start comes on top of its budget."""
    options: dict[str, Any] = {"kind": kind, "solver": "broyden", "seed": seed, "gain": gain}
    theirs = old("residual_after", **options, f_max_iter=steps)["residual"]
    mine = ours("residual_after", **options, f_max_iter=steps + 1)["residual"]
    if kind in ("ignn", "ddim"):  # rows depend on each other: one system has one residual
        mine, theirs = mine.norm(), theirs.norm()
    assert (mine <= 1.01 * theirs + 1e-12).all(), (mine, theirs)


def test_fault_early_convergence_loses_states_and_the_implicit_gradient(old: Ask) -> None:
    options = {"core": "indexing", "ift": True, "n_states": 4, "f_tol": 1e-3}
    theirs, mine = (ask("half_map", options=options) for ask in (old, ours))
    assert (theirs["states"], theirs["gradient"]) == (1, 1.0)
    assert mine["states"] == 4
    assert mine["gradient"] == pytest.approx(2, abs=1e-5)


def test_fault_the_gradient_depends_on_the_scale_of_the_loss(old: Ask) -> None:
    options = {"ift": True, "f_tol": 1e-9}
    theirs, mine = (ask("half_map", options=options, scale=1e-8) for ask in (old, ours))
    assert theirs["gradient"] == pytest.approx(1e-8)
    assert mine["gradient"] == pytest.approx(2e-8)


def test_fault_the_simple_iteration_cannot_solve_backwards(old: Ask) -> None:
    options = {"ift": True, "f_tol": 1e-9, "b_solver": "simple_fixed_point_iter"}
    theirs, mine = (ask("half_map", options=options) for ask in (old, ours))
    assert theirs["error"] == "TypeError"
    assert mine["gradient"] == pytest.approx(2)


@pytest.mark.parametrize("kind", ["ift", "hook_ift"])
def test_fault_tuple_states_with_simple_iteration_have_no_implicit_gradient(
    old: Ask, kind: str
) -> None:
    options = {kind: True, "f_solver": "simple_fixed_point_iter", **TIGHT}
    theirs, mine = (ask("run_deq", options=options, state="pair") for ask in (old, ours))
    assert theirs["error"] == "AttributeError"
    options["f_solver"] = "fixed_point_iter"
    right = old("run_deq", options=options, state="pair")
    torch.testing.assert_close(mine["gradients"], right["gradients"], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("hook_ift", [True, False])
def test_fault_second_derivatives_are_silently_wrong(old: Ask, hook_ift: bool) -> None:
    """`z = w^2 / (1 - w / 2)` has `z'(1) = 6` and `z''(1) = 16`."""
    theirs = old("second_derivative", options={"hook_ift": hook_ift})
    assert theirs["first"] == pytest.approx(6)
    assert theirs["second"] == pytest.approx(4)
    assert ours("second_derivative", options={"hook_ift": hook_ift})["error"] == "RuntimeError"
    mine = ours("second_derivative", options={"hook_ift": hook_ift, "higher_order": True})
    assert mine == pytest.approx({"first": 6, "second": 16})


def test_fault_evaluation_has_no_gradient(old: Ask) -> None:
    assert old("evaluate_with_gradient")["gradient"] is None
    assert ours("evaluate_with_gradient")["gradient"] == pytest.approx(2)


@pytest.mark.parametrize("name", ["fixed_point_iter", "anderson"])
def test_fault_a_nan_destroys_the_best_state(old: Ask, name: str) -> None:
    assert not old("poisoned_step", solver=name)["finite"]
    assert ours("poisoned_step", solver=name)["finite"]


@pytest.mark.parametrize("name", ["fixed_point_iter", "anderson", "broyden"])
def test_fault_the_answer_depends_on_batch_mates(old: Ask, name: str) -> None:
    assert old("with_mates", solver=name)["difference"] > 1e-6
    assert ours("with_mates", solver=name)["difference"] < 1e-12


@pytest.mark.parametrize(
    ("name", "budget", "calls"), [("broyden", 2, 3), ("anderson", 1, 2), ("anderson", 2, 2)]
)
def test_fault_budgets_do_not_count_evaluations(
    old: Ask, name: str, budget: int, calls: int
) -> None:
    theirs, mine = (ask("counted", solver=name, budget=budget) for ask in (old, ours))
    assert theirs == {"calls": calls, "moved": name == "broyden"}
    assert mine == {"calls": budget, "moved": True}


def test_fault_initialising_a_normalised_weight_is_undone(old: Ask) -> None:
    written = [[3.0, 4.0], [0.0, 1.0]]
    assert old("initialise_late")["weight"] != written
    assert ours("initialise_late")["weight"] == written


def test_fault_a_misspelt_option_is_ignored_and_the_dict_written_to(old: Ask) -> None:
    assert old("slip", option="f_stopmode")["given"]["core"] == "indexing"
    assert "did you mean 'f_stop_mode'" in ours("slip", option="f_stopmode")["message"]
