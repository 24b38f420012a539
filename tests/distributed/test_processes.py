"""Training in several processes gives the gradients of one process on the joined batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import cases
from tests.distributed.cases import Agreed, Report
from tests.distributed.launch import run_together
from tests.versions import needs_cpu_shards

pytestmark = [
    pytest.mark.xdist_group("processes"),  # one worker starts the processes, once
    needs_cpu_shards,
]

EXACT = 1e-9
FORWARD = ("anderson", "broyden", "fixed_point_iter")
ADJOINT = ("gmres", "fixed_point_iter", "broyden")
UNITS = ("layer", "cell", "linears")
REVERSIBLE: dict[str, Any] = {
    "f_solver": "fixed_point_iter",
    "backward": "reversible",
    "f_max_iter": 40,
    "f_tol": 0,
    "tau": 0.5,
}


def implicit(forward: str, adjoint: str) -> dict[str, Any]:
    """Return the options of implicit differentiation with two solvers."""
    return {"f_solver": forward, "b_solver": adjoint, "ift": True}


def phantom(forward: str) -> dict[str, Any]:
    """Return the options of the phantom gradient."""
    return {"f_solver": forward, "grad": 4, "tau": 0.8}


METHODS = {
    **{f"ift {f} {b}": implicit(f, b) for f in FORWARD for b in ADJOINT},
    **{f"phantom {f}": phantom(f) for f in FORWARD},
    "reversible": REVERSIBLE,
}
#: Solvers and stopping rules with a collective in f: options, whether samples leave the batch, and
#: whether the solve chooses its own intervals of checks.
AGREEMENTS: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "anderson gmres": (implicit("anderson", "gmres"), False, False),
    "broyden bicgstab": (implicit("broyden", "bicgstab"), False, False),
    "plain neumann": (implicit("fixed_point_iter", "neumann"), False, False),
    "auto broyden": (implicit("auto", "broyden") | {"f_max_iter": 160}, False, False),
    "newton gmres restarted": (
        implicit("newton_krylov", "gmres")
        | {"f_solver_kwargs": {"jacobian": "difference"}, "b_solver_kwargs": {"restart": 3}},
        False,
        False,
    ),
    "line search newton": (
        implicit("broyden", "newton_krylov") | {"f_solver_kwargs": {"ls": True}}, False, False,
    ),
    "compact anderson plain": (implicit("anderson", "fixed_point_iter"), True, False),
    "compact auto anderson": (
        implicit("auto", "anderson") | {"f_max_iter": 160, "coupled": False}, True, False,
    ),
    "check every 4": (
        implicit("anderson", "gmres") | {"f_check_every": 4, "b_check_every": 3}, False, False,
    ),
    "check auto": (implicit("fixed_point_iter", "gmres") | {"f_check_every": "auto"}, False, True),
    "coupled": (implicit("anderson", "gmres") | {"coupled": True}, False, False),
    "phantom": (phantom("anderson"), False, False),
}  # fmt: skip
MIXTURES: dict[str, dict[str, Any]] = {
    "probed gmres": implicit("fixed_point_iter", "gmres"),
    "probed broyden": implicit("fixed_point_iter", "broyden"),
    "plain": implicit("broyden", "fixed_point_iter") | {"coupled": True},
    "coupled bicgstab": implicit("anderson", "bicgstab") | {"coupled": True},
    "coupled neumann": implicit("fixed_point_iter", "neumann") | {"coupled": "adjoint"},
    "coupled newton": implicit("newton_krylov", "gmres")
    | {"coupled": True, "f_solver_kwargs": {"jacobian": "difference"}},
}


def check_report(name: str, reports: list[Any]) -> None:
    """Check the gradients of all processes, and that their numbers of evaluations differ."""
    for report in reports:
        assert isinstance(report, Report), f"{name}: {report}"
        assert max(report.errors) < EXACT, f"{name}: {report}"
    if "reversible" not in name:
        assert len({report.nfe for report in reports}) > 1, f"{name}: {reports}"


def check_agreement(name: str, reports: list[Any]) -> None:
    """Check the gradients of all processes, and that their numbers of evaluations are equal."""
    for report in reports:
        assert isinstance(report, Agreed), f"{name}: {report}"
        assert report.error < EXACT, f"{name}: {report}"
        assert report.same_as_alone or name == "coupled", f"{name}: {report}"
    assert len({(report.nfe, report.products, report.reduces) for report in reports}) == 1, name


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Return the results of a few cases in two processes, which start once."""
    anderson, plain = implicit("anderson", "gmres"), implicit("fixed_point_iter", "broyden")
    chosen = ("anderson gmres", "newton gmres restarted", "compact auto anderson", "check every 4")
    return run_together(
        tmp_path_factory.mktemp("few"),
        2,
        {
            "ddp": (cases.data_parallel, (anderson,)),
            "layer": (cases.sharded, ("layer", anderson)),
            "cell": (cases.sharded, ("cell", plain)),
            "linears": (cases.sharded, ("linears", anderson)),
            "linears phantom": (cases.sharded, ("linears", phantom("broyden"))),
            "linears reversible": (cases.sharded, ("linears", REVERSIBLE)),
            **{f"agree {name}": (cases.gathering, AGREEMENTS[name]) for name in chosen},
            "mixing": (cases.mixing, (MIXTURES["probed gmres"],)),
            "no samples": (cases.uneven, ((0, 4), anderson | {"f_check_every": 4})),
            "no samples, broyden": (cases.uneven, ((0, 4), plain)),
            "one and many samples": (cases.uneven, ((1, 6), plain)),
            "held twice": (cases.held_twice, ()),
            "backward": (cases.explicit_backward_group, ()),
            "failure": (cases.failure_of_one, ()),
            "refusals": (cases.refusals, ()),
            "dead peer": (cases.dead_peer, ()),
        },
        seconds=120,
    )


@pytest.mark.parametrize(
    "name", ["ddp", "layer", "cell", "linears", "linears phantom", "linears reversible"]
)
def test_gradients_are_those_of_one_process_on_the_joined_batch(
    few: dict[str, list[Any]], name: str
) -> None:
    check_report(name, few[name])


def test_data_parallel_training_pays_nothing(few: dict[str, list[Any]]) -> None:
    assert all(not report.forward and not report.backward for report in few["ddp"])


def test_units_inside_f_are_gathered_once_per_solve(few: dict[str, list[Any]]) -> None:
    units = {"layer": 2, "cell": 2, "linears": 3}  # the root is a unit, too
    for name, count in units.items():
        for report in few[name]:
            assert report.forward == {"all_gather": count}, f"{name}: {report}"
            assert report.backward["reduce_scatter"] == count, f"{name}: {report}"
            assert report.backward["all_gather"] <= count + 1, f"{name}: {report}"
            assert "all_reduce" not in report.backward, f"{name}: {report}"


@pytest.mark.parametrize(
    "name", ["anderson gmres", "newton gmres restarted", "compact auto anderson", "check every 4"]
)
def test_processes_with_a_collective_in_f_stop_together(
    few: dict[str, list[Any]], name: str
) -> None:
    check_agreement(name, few[f"agree {name}"])


def test_a_check_costs_one_all_reduce(few: dict[str, list[Any]]) -> None:
    often, seldom = few["agree anderson gmres"][0], few["agree check every 4"][0]
    assert often.reduces == often.nfe + 1  # on_failure="raise" asks once whether any has failed
    assert seldom.reduces == -(-seldom.nfe // 4) + 1


def test_samples_that_depend_on_those_of_other_processes_have_exact_gradients(
    few: dict[str, list[Any]],
) -> None:
    assert all(error < EXACT for error in few["mixing"]), few["mixing"]


@pytest.mark.parametrize("name", ["no samples", "no samples, broyden", "one and many samples"])
def test_processes_may_have_different_numbers_of_samples_or_none(
    few: dict[str, list[Any]], name: str
) -> None:
    assert all(isinstance(error, float) and error < EXACT for error in few[name]), few[name]


def test_hold_gathers_once_for_several_solves(few: dict[str, list[Any]]) -> None:
    assert few["held twice"] == [{"all_gather": 2}] * 2


def test_the_rule_of_the_backward_solve_has_its_own_group(few: dict[str, list[Any]]) -> None:
    assert few["backward"][0] == few["backward"][1]


def test_an_error_in_one_process_is_an_error_in_all(few: dict[str, list[Any]]) -> None:
    slow, fast = few["failure"]
    assert "failed for some samples" in slow
    assert "failed in another process" in fast


def test_what_cannot_work_with_shards_says_the_way_out(few: dict[str, list[Any]]) -> None:
    for texts in few["refusals"]:
        higher_order, state, norm = texts
        assert "call fully_shard on the module whose forward contains" in higher_order
        assert "to_local" in state
        assert "call reset_norm inside the forward pass" in norm


def test_a_peer_that_never_answers_gives_an_error(few: dict[str, list[Any]]) -> None:
    assert "could not agree when to stop" in few["dead peer"][0]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_every_method_is_exact_in_every_way_of_sharing(world: int, tmp_path: Path) -> None:
    names: dict[str, Any] = {
        **{f"ddp {name}": (cases.data_parallel, (way,)) for name, way in METHODS.items()},
        **{
            f"{unit} {name}": (cases.sharded, (unit, way))
            for unit in UNITS
            for name, way in METHODS.items()
        },
    }
    for name, reports in run_together(tmp_path, world, names, seconds=900).items():
        print(name, *reports)
        check_report(name, reports)
        if name.startswith("ddp"):
            assert all(not report.forward and not report.backward for report in reports)


@pytest.mark.slow
def test_shards_and_checkpoints_work_together(tmp_path: Path) -> None:
    options = implicit("anderson", "gmres")
    names: dict[str, Any] = {
        f"{unit} {kind} {name}": (cases.sharded, (unit, way, kind))
        for unit in UNITS
        for kind in ("layer", "cell")
        for name, way in (("ift", options), ("phantom", phantom("anderson")))
    }
    higher = options | {"higher_order": True}
    names["layer layer higher"] = (cases.sharded, ("layer", higher, "layer"))
    for name, reports in run_together(tmp_path, 2, names, seconds=600).items():
        print(name, *reports)
        check_report(name, reports)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_every_solver_stops_together_with_its_peers(world: int, tmp_path: Path) -> None:
    mixtures: dict[str, Any] = {
        f"mixing {name}": (cases.mixing, (options,)) for name, options in MIXTURES.items()
    }
    names: dict[str, Any] = {name: (cases.gathering, case) for name, case in AGREEMENTS.items()}
    names["tensor parallel"] = (cases.tensor_parallel, (implicit("anderson", "gmres"),))
    found = run_together(tmp_path, world, names | mixtures, seconds=600)
    for name, results in found.items():
        print(name, *results)
    for name, results in found.items():
        if name in names:
            check_agreement(name, results)
        else:
            assert all(isinstance(e, float) and e < EXACT for e in results), (name, results)
