"""The doctor at its limits: maps with misleading numbers, wrong arguments, short times."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torchdeq import DEQConfig, doctor, get_deq
from torchdeq.diagnostics import Diagnosis, Kind
from torchdeq.diagnostics.guarding import Clock, OutOfTime

OPTIONS: dict[str, Any] = {
    "seconds": 60.0,
    "solvers": ("fixed_point_iter", "broyden"),
    "budget": 80,
    "gradients": False,
}
A = torch.tensor([[0.4, 0.2], [-0.1, 0.5]], dtype=torch.float64)


def affine(z: Tensor) -> Tensor:
    return z @ A.mT + 1


def test_a_fixed_point_far_away_is_not_called_missing() -> None:
    # In float32 the singular value 3e-7 of I - J is lost beside the norm of 1e6.
    N = torch.tensor([[0.5, 1e6], [0.0, 0.4]])
    found = doctor(lambda z: z @ N.mT + 1, torch.zeros(2, 2), **OPTIONS)
    assert Kind.NO_FIXED_POINT not in found.kinds
    assert Kind.NOT_CONTRACTING not in found.kinds  # plain iteration has converged
    assert Kind.NEARLY_SINGULAR in found.kinds
    assert all(trial.solved for trial in found.solvers)


def test_a_slow_contraction_has_one_fixed_point_and_no_line_of_them() -> None:
    rates = torch.linspace(0.1, 0.999, 4)[:, None]
    found = doctor(lambda z: rates * z + 1, torch.zeros(4, 3), **OPTIONS)
    assert Kind.SEVERAL_FIXED_POINTS not in found.kinds
    assert not any("line" in finding.evidence for finding in found.findings)


def test_a_start_at_an_unstable_fixed_point_does_not_recommend_plain_iteration() -> None:
    found = doctor(lambda z: 2 * z, torch.zeros(2, 3), **OPTIONS)
    assert Kind.NOT_CONTRACTING in found.kinds
    assert "--f_solver fixed_point_iter" not in found.recommendation.flags


def test_a_start_that_is_nan_has_one_cause() -> None:
    found = doctor(affine, torch.full((2, 2), torch.nan, dtype=torch.float64), **OPTIONS)
    assert found.kinds == {Kind.OVERFLOW}


def test_an_error_of_f_is_reported_where_it_ends_a_stage() -> None:
    for calls in (30, 70):
        left = iter(range(calls))

        def f(z: Tensor, left: Any = left) -> Tensor:
            if next(left, None) is None:
                raise RuntimeError("the sensor is offline")
            return affine(z)

        found = doctor(f, torch.zeros(2, 2, dtype=torch.float64), **OPTIONS)
        assert any("sensor" in line for line in found.skipped)
        assert not any("time" in line for line in found.skipped)


def test_the_checks_of_a_slow_map_end_in_time() -> None:
    calls: list[int] = []

    def f(z: Tensor) -> Tensor:
        calls.append(1)
        time.sleep(0.2)
        return affine(z)

    found = doctor(f, torch.zeros(2, 2, dtype=torch.float64), **{**OPTIONS, "seconds": 0.5})
    assert len(calls) <= 6
    assert any("checks of f" in line and "time" in line for line in found.skipped)


def test_products_of_a_limited_map_end_in_time() -> None:
    clock = Clock(0.05)
    z = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)
    out = clock.limited(affine, 1.0)(z)
    time.sleep(0.06)
    with pytest.raises(OutOfTime, match="have passed"):
        torch.autograd.grad(out.sum(), z)


def test_running_out_of_time_among_other_starts_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # newton_krylov turns an error inside a product into NotImplementedError.
    def limited(clock: Clock, f: Callable[..., Any], share: float) -> Callable[..., Any]:
        left = iter(range(1 if share == 1.0 else 10_000))

        def call(*inputs: Any) -> Any:
            if next(left, None) is None:
                raise OutOfTime("no time")
            return f(*inputs)

        return call

    monkeypatch.setattr(Clock, "limited", limited)
    config = DEQConfig(f_solver="newton_krylov", f_tol=1e-6, f_stop_mode="rel")
    z0 = torch.zeros(2, 2, dtype=torch.float64)
    found = doctor(affine, z0, config=config, solvers=(), gradients=False)
    assert found.paths is None
    assert "compare starts: out of time" in found.skipped


def test_flags_of_a_caller_without_options_are_complete() -> None:
    found = doctor(affine, torch.zeros(2, 2, dtype=torch.float64), seconds=60.0, budget=80)
    pairs = [flag.partition(" ") for flag in found.recommendation.flags]
    flags = {name: value for name, _, value in pairs}
    assert flags["--f_stop_mode"] == "rel"
    assert "--ift" in flags
    options: dict[str, Any] = {name[2:]: value for name, value in flags.items()}
    options |= {"f_max_iter": int(flags["--f_max_iter"]), "f_tol": float(flags["--f_tol"])}
    deq = get_deq(**options | {"ift": True})
    _, stats = deq(affine, torch.zeros(2, 2, dtype=torch.float64))
    assert bool(stats.converged.all())
    own: Diagnosis = doctor(
        affine, torch.zeros(2, 2, dtype=torch.float64), config=DEQConfig(ift=True), **OPTIONS
    )
    assert "--f_stop_mode rel" not in own.recommendation.flags


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"z0": torch.zeros(0, 2)}, "must have samples"),
        ({"z0": torch.zeros(2, 0)}, "must have samples"),
        ({"solvers": "anderson"}, "names of solvers"),
        ({"config": {"f_tol": 1e-3}}, "must be a DEQConfig"),
        ({"loss": lambda z: z.sum(1)}, "one number"),
        ({"loss": lambda z: z.detach().sum()}, "depend on the state"),
        ({"seconds": "5"}, "seconds must be positive"),
        ({"budget": 0}, "budget must be"),
    ],
)
def test_wrong_arguments_are_errors_at_once(options: dict[str, Any], message: str) -> None:
    z0 = options.pop("z0", torch.zeros(2, 2))
    with pytest.raises((ValueError, TypeError), match=message):
        doctor(lambda z: 0.5 * z, z0, **options)


def test_an_operation_without_forward_mode_is_reported_with_advice_alone() -> None:
    class Scale(torch.autograd.Function):  # has no jvp
        @staticmethod
        def forward(ctx: Any, z: Tensor) -> Tensor:
            return 0.5 * z + 1

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return 0.5 * g

    found = doctor(Scale.apply, torch.zeros(2, 3), **OPTIONS | {"solvers": ["newton_krylov"]})
    text = " ".join(str(found).split())
    assert "failed: newton_krylov: differentiates f in forward mode, which failed: pass" in text
    assert text.endswith("--f_opt jacobian=difference")  # and not the error of torch


def test_figures_of_single_samples_say_so() -> None:
    found = doctor(affine, torch.zeros(2, 2, dtype=torch.float64), **OPTIONS)
    text = str(found)
    assert "Leading eigenvalues of J, slowest sample: " in text
    assert "Smallest singular value of I - J, of all samples: " in text
