"""Every example runs, says something, and what it says is so."""

from __future__ import annotations

import re
import runpy
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from torchdeq.norm import NORMS
from torchdeq.solver import SOLVERS

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))

Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs an example as a program and returns what it prints; warnings are errors."""

    def program(name: str, *flags: str) -> str:
        with monkeypatch.context() as patch, warnings.catch_warnings():
            for registry in (SOLVERS, NORMS):  # names of an example stay there
                patch.setattr(registry, "_entries", dict(registry._entries))
            patch.setattr("sys.argv", [name, *flags])
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", message=".torch.jit.script. is deprecated")
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return program


def numbers(text: str, pattern: str) -> list[float]:
    """What the group of `pattern` finds, line by line."""
    return [float(found) for found in re.findall(pattern, text)]


def test_the_mini_deq_learns(run: Run) -> None:
    (accuracy,) = numbers(run("mini_deq"), r"accuracy ([\d.]+)%")
    assert accuracy > 90


def test_admm_solves_the_lasso_and_its_penalty_improves(run: Run) -> None:
    out = run("two_variables")
    first, *_, last = numbers(out, r"error ([\d.]+)")
    assert last < first / 2
    assert numbers(out, r"violation.* (\S+)\n")[0] < 1e-3


@pytest.mark.parametrize("name", ["heavy_ball", "averaged"])
def test_a_registered_solver_is_chosen_by_a_flag(run: Run, name: str) -> None:
    out = run("custom_solver", "--f_solver", name)
    assert out.startswith(name)
    assert out.count("CONVERGED 8") == 4


def test_options_of_a_registered_solver_are_flags(run: Run) -> None:
    (momentum, *_), (plain, *_) = (
        numbers(run("custom_solver", "--f_opt", f"beta={beta}"), r"(\d+) evaluations")
        for beta in (0.3, 0.0)
    )
    assert momentum < plain


def test_a_registered_norm_bounds_what_it_says(run: Run) -> None:
    free, *bound = numbers(run("custom_norm"), r"up to +([\d.]+)")
    assert free > 1
    assert bound == [0.9, 0.5]


def test_monitoring_sees_the_equilibrium_go(run: Run) -> None:
    easy, hard, lost = run("monitoring").split("gain")[1:]
    assert "MAX_ITER" not in easy
    assert re.search("forward +CONVERGED 8;.*\n +backward .*MAX_ITER", hard)
    assert re.search("forward .*MAX_ITER", lost)


def test_reuse_saves_evaluations_and_keeps_the_answer(run: Run) -> None:
    out = run("reuse_on_a_stream")
    assert min(numbers(out, r"(\d+)% saved")) > 20
    assert numbers(out, r"by at most (\S+),")[0] < 1e-3


def test_random_budgets_pay_when_more_steps_are_taken(run: Run) -> None:
    _, fixed, random = run("random_iterations").splitlines()
    assert float(random.split()[-1]) < float(fixed.split()[-1])


def test_mixed_starts_pay_when_the_start_is_another(run: Run) -> None:
    zero, mixed = numbers(run("mixed_initialisation"), r"([\d.]+) from a random start")
    assert mixed < zero / 2


def test_every_derivative_is_exact(run: Run) -> None:
    errors = numbers(run("second_order"), r"  +(\S+e-\d+)\n")
    assert len(errors) == 5
    assert max(errors) < 1e-10


def test_flags_reach_the_deq(run: Run) -> None:
    out = run("namespace_and_flags", "--f_solver", "broyden", "--f_opt", "l_thres=20", "--ift")
    assert "f_solver='broyden', f_solver_kwargs={'l_thres': 20}, ift=True" in out
    assert "2 states" in out


@pytest.mark.parametrize("name", NAMES)
def test_every_example_is_tested_here_and_says_what_it_shows(name: str) -> None:
    assert f'"{name}"' in Path(__file__).read_text()
    assert (EXAMPLES / f"{name}.py").read_text().startswith('"""')
