"""The doctor's diagnosis is right, for maps whose illness is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import problems
from tests.diagnostics.maps import drifting
from torchdeq import DEQConfig, apply_norm, doctor, reset_norm
from torchdeq.diagnostics import Diagnosis, Kind, Severity

REL = DEQConfig(f_solver="anderson", f_tol=1e-6, f_stop_mode="rel", ift=True, b_solver="gmres")


def diagnose(f: Callable[..., Any], z0: Any, config: DEQConfig = REL, **options: Any) -> Diagnosis:
    """Examine a map; two solvers beside the configured one, and no gradients, save time."""
    defaults: dict[str, Any] = {
        "seconds": 60.0,
        "solvers": ("fixed_point_iter", "broyden"),
        "budget": 80,
        "gradients": False,
    }
    return doctor(f, z0, config=config, **defaults | options)


def evidence(diagnosis: Diagnosis, kind: Kind) -> str:
    return next(finding.evidence for finding in diagnosis.findings if finding.kind is kind)


def layer(d: int = 8, gain: float = 0.5) -> nn.Linear:
    torch.manual_seed(1)
    linear = nn.Linear(d, d).double()
    with torch.no_grad():
        linear.weight.copy_(problems.contraction(gain, d))
    return linear


def test_a_contraction_is_healthy() -> None:
    linear, x = layer(), torch.randn(4, 8, dtype=torch.float64)
    f = lambda z: torch.tanh(linear(z) + x)  # noqa: E731
    found = diagnose(f, torch.zeros_like(x), gradients=True)
    assert found.kinds == {Kind.CONTRACTION}
    assert found.healthy
    assert all(trial.solved for trial in found.solvers)
    own = found.backwards[0]
    assert own.configured
    assert own.exact
    assert own.quality is not None
    assert own.quality.inputs == 2
    flags = dict(flag.split() for flag in found.recommendation.flags)
    assert flags["--f_solver"] in ("fixed_point_iter", "anderson")
    assert found.paths is not None
    assert float(found.paths.distances.max()) < 1e-4


def test_a_rotation_of_099_contracts_slowly_and_a_faster_solver_is_recommended() -> None:
    f, z0, _ = problems.affine(problems.rotation(0.99))
    found = diagnose(f, z0)
    assert found.kinds == {Kind.SLOW_CONTRACTION}
    assert "0.99" in evidence(found, Kind.SLOW_CONTRACTION)
    assert "i" in evidence(found, Kind.SLOW_CONTRACTION)  # a complex pair
    flags = dict(flag.split() for flag in found.recommendation.flags)
    assert flags["--f_solver"] in ("anderson", "broyden", "newton_krylov")
    plain = next(trial for trial in found.solvers if trial.name == "fixed_point_iter")
    assert not plain.solved


def test_a_non_normal_map_is_recognised_by_its_growth() -> None:
    f, z0, _ = problems.affine(problems.non_normal())
    found = diagnose(f, z0)
    assert Kind.NON_NORMAL in found.kinds
    assert Kind.NOT_CONTRACTING not in found.kinds
    assert found.jacobian is not None
    assert found.jacobian.normality is not None
    assert 1.3 < float(found.jacobian.normality.norm.max()) < 1.5


def test_a_map_without_a_fixed_point_has_a_shift_direction() -> None:
    found = diagnose(*drifting())
    assert Kind.NO_FIXED_POINT in found.kinds
    assert Kind.UNSOLVED not in found.kinds
    assert "--f_max_iter 0" in found.recommendation.flags
    assert found.jacobian is not None
    assert found.jacobian.directions is not None
    assert found.jacobian.shift is not None
    assert found.jacobian.shift < 0.05


@pytest.mark.slow
def test_a_loose_relative_tolerance_does_not_hide_that_iterates_drift() -> None:
    found = diagnose(*drifting(), DEQConfig(f_tol=1e-2, f_stop_mode="rel"), budget=200)
    assert found.solvers[0].solved  # by the growth of the state
    assert Kind.NO_FIXED_POINT in found.kinds


def test_a_line_of_fixed_points_is_nearly_singular_but_solvable() -> None:
    A = torch.diag(torch.tensor([1.0, 0.5, 0.2], dtype=torch.float64))
    found = diagnose(lambda z: z @ A, torch.randn(3, 3, dtype=torch.float64))
    assert Kind.NEARLY_SINGULAR in found.kinds
    assert Kind.NO_FIXED_POINT not in found.kinds


def test_dropout_inside_f_is_random_also_where_the_start_is_zero() -> None:
    drop, linear = nn.Dropout(0.5), layer()
    x = torch.randn(4, 8, dtype=torch.float64)
    found = diagnose(lambda z: torch.tanh(linear(drop(z)) + x), torch.zeros_like(x))
    assert found.findings[0].kind is Kind.RANDOM
    assert "(drop)" in found.findings[0].evidence
    assert found.solvers[0].solved  # with its random numbers kept fixed
    assert "reset_dropout" in found.recommendation.words[0]


def test_a_map_that_counts_its_calls_is_not_called_random() -> None:
    calls: list[int] = []

    def f(z: Tensor) -> Tensor:
        calls.append(1)
        return 0.5 * z + len(calls)

    found = diagnose(f, torch.zeros(2, 3), seconds=10.0)
    assert Kind.STATEFUL in found.kinds
    assert Kind.RANDOM not in found.kinds


def test_train_mode_batch_norm_is_found_and_its_statistics_are_untouched() -> None:
    net = nn.Sequential(layer(6), nn.BatchNorm1d(6)).double()
    x = torch.randn(5, 6, dtype=torch.float64)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    found = diagnose(lambda z: 0.5 * torch.tanh(net(z) + x), torch.zeros_like(x))
    assert Kind.BATCH_STATISTICS in found.kinds
    assert Kind.COUPLED not in found.kinds  # one cause, one finding
    assert found.subject.coupled
    assert "--coupled true" in found.recommendation.flags
    after = net.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    net.eval()
    assert Kind.BATCH_STATISTICS not in diagnose(
        lambda z: 0.5 * torch.tanh(net(z) + x), torch.zeros_like(x)
    ).kinds  # fmt: skip


@pytest.mark.slow
def test_batch_norm_outside_f_is_not_blamed() -> None:
    stem, linear = nn.BatchNorm1d(8).double(), layer()
    u = stem(torch.randn(4, 8, dtype=torch.float64)).detach()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.linear = stem, linear

        def f(self, z: Tensor) -> Tensor:
            return torch.tanh(self.linear(z) + u)

    assert Kind.BATCH_STATISTICS not in diagnose(Model().f, torch.zeros_like(u)).kinds


@pytest.mark.parametrize("declared", [None, False, True])
def test_coupled_rows_are_found(declared: bool | None) -> None:
    map_of, _, W, x = problems.graph(nodes=6, d=3)
    found = diagnose(map_of(W, x), torch.zeros_like(x), REL.with_options(coupled=declared))
    assert Kind.COUPLED in found.kinds
    severity = {None: Severity.WARNING, False: Severity.ERROR, True: Severity.NOTE}[declared]
    assert next(f for f in found.findings if f.kind is Kind.COUPLED).severity is severity
    assert ("--coupled true" in found.recommendation.flags) is not bool(declared)
    assert all(trial.solved for trial in found.solvers)
    assert found.jacobian is not None
    assert len(found.jacobian.spectrum.values) == 1


def test_a_constant_f_ignores_its_state() -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    found = diagnose(lambda z: x.clone(), torch.zeros_like(x))
    assert found.findings[0].kind is Kind.IGNORES_STATE
    assert found.recommendation.flags == ()


def test_f_that_cuts_its_graph_is_found() -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    found = diagnose(lambda z: 0.5 * z.detach() + x, torch.zeros_like(x), solvers=())
    assert Kind.CUTS_GRAPH in found.kinds
    assert Kind.IGNORES_STATE not in found.kinds
    with torch.inference_mode(), pytest.raises(RuntimeError, match="outside torch"):
        diagnose(lambda z: 0.5 * z + x, torch.zeros_like(x))


@pytest.mark.parametrize("hidden", [False, True])
def test_bf16_f_is_found_from_its_dtype_or_from_its_rounding(hidden: bool) -> None:
    W = problems.contraction(0.7, 32).to(torch.bfloat16)
    x = torch.randn(4, 32).to(torch.bfloat16)

    def f(z: Tensor) -> Tensor:
        out = torch.tanh(z.to(torch.bfloat16) @ W.mT + x)
        return out.float() if hidden else out

    found = diagnose(f, torch.zeros(4, 32), DEQConfig(f_tol=1e-5, f_stop_mode="rel"))
    assert {Kind.LOW_PRECISION, Kind.TOLERANCE_BELOW_PRECISION} <= found.kinds
    assert 2.0**-10 <= found.subject.eps <= 2.0**-6
    assert Kind.UNSOLVED not in found.kinds
    flag = next(flag for flag in found.recommendation.flags if flag.startswith("--f_tol"))
    assert 1e-3 < float(flag.split()[1]) < 0.1


@pytest.mark.slow
def test_single_precision_is_not_called_low() -> None:
    for gain in (0.5, 0.9):
        f, z0 = problems.tanh_layer(d=64, gain=gain, dtype=torch.float32)
        assert Kind.LOW_PRECISION not in diagnose(f, z0).kinds
    relu = nn.Linear(64, 64)
    x = torch.randn(4, 64)
    assert Kind.LOW_PRECISION not in diagnose(
        lambda z: torch.relu(0.3 * relu(z) + x), torch.zeros_like(x)
    ).kinds  # fmt: skip


def test_a_tolerance_below_single_precision_gets_a_reachable_one() -> None:
    f, z0 = problems.tanh_layer(gain=0.9, dtype=torch.float32)
    found = diagnose(f, z0, DEQConfig(f_tol=1e-12, f_solver="anderson"))
    assert Kind.TOLERANCE_BELOW_PRECISION in found.kinds


@pytest.mark.parametrize("where", ["input", "output"])
def test_f_that_writes_in_place_is_found_and_still_examined(where: str) -> None:
    x, buffer = torch.randn(3, 4, dtype=torch.float64), torch.zeros(3, 4, dtype=torch.float64)

    def f(z: Tensor) -> Tensor:
        if where == "input":
            return z.mul_(0.5).add_(x)
        return torch.add(x, z.detach(), alpha=0.5, out=buffer)

    z0 = torch.zeros_like(x)
    found = diagnose(f, z0)
    assert found.findings[0].kind is Kind.WRITES_IN_PLACE
    assert torch.equal(z0, torch.zeros_like(x))
    assert any(trial.solved for trial in found.solvers)


def test_a_missing_reset_norm_is_found() -> None:
    linear = layer()
    apply_norm(linear, "weight_norm")
    x = torch.randn(4, 8, dtype=torch.float64)

    def f(z: Tensor) -> Tensor:
        return torch.tanh(linear(z) + x)

    reset_norm(linear)
    assert Kind.STALE_NORM not in diagnose(f, torch.zeros_like(x)).kinds
    with torch.no_grad():  # an optimizer step
        for p in linear.parameters():
            p.mul_(1.1)
    assert Kind.STALE_NORM in diagnose(f, torch.zeros_like(x)).kinds
    reset_norm(linear)
    assert Kind.STALE_NORM not in diagnose(f, torch.zeros_like(x)).kinds


def test_overflow_is_found_at_the_start_and_on_the_way() -> None:
    z0 = torch.ones(2, 3)
    found = diagnose(lambda z: z * float("nan"), z0)
    assert Kind.OVERFLOW in found.kinds
    assert found.solvers == ()
    plain = DEQConfig(f_max_iter=100, f_tol=1e-4)
    found = diagnose(lambda z: (10 * z) ** 3 + 1, z0, plain)
    assert Kind.OVERFLOW in found.kinds


def test_a_budget_that_is_too_small_gets_a_larger_one() -> None:
    f, z0, _ = problems.affine(problems.rotation(0.9))
    config = DEQConfig(f_max_iter=10, f_tol=1e-6, ift=True, b_solver="gmres")
    found = diagnose(f, z0, config, budget=400, solvers=())
    assert Kind.BUDGET_TOO_SMALL in found.kinds
    finding = next(each for each in found.findings if each.kind is Kind.BUDGET_TOO_SMALL)
    assert int(finding.flags[0].split()[1]) >= (found.solvers[0].evaluations or 0)
    enough = diagnose(f, z0, config.with_options(f_max_iter=400), budget=400, solvers=())
    assert Kind.BUDGET_TOO_SMALL not in enough.kinds


def test_a_repelling_map_does_not_contract_and_other_solvers_are_recommended() -> None:
    f, z0, _ = problems.affine(problems.repelling())
    config = DEQConfig(f_tol=1e-6, f_stop_mode="rel", ift=True)
    found = diagnose(f, z0, config, gradients=True)
    assert {Kind.NOT_CONTRACTING, Kind.ADJOINT_FAILS} <= found.kinds
    assert "-3" in evidence(found, Kind.NOT_CONTRACTING)
    flags = [flag.split()[0] for flag in found.recommendation.flags]
    assert "--b_solver" in flags


def test_few_phantom_steps_on_a_slow_map_are_an_inexact_gradient() -> None:
    A, x = 0.97 * torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64)).Q, torch.ones(
        3, 8, dtype=torch.float64, requires_grad=True
    )  # fmt: skip
    found = diagnose(lambda z: z @ A.mT + x, torch.zeros(3, 8, dtype=torch.float64),
                     REL.with_options(ift=False, grad=1), gradients=True)  # fmt: skip
    assert Kind.INEXACT_GRADIENT in found.kinds
    assert "--ift" in found.recommendation.flags


def test_two_fixed_points_are_found_from_other_starts() -> None:
    found = diagnose(lambda z: torch.tanh(3 * z), torch.full((6, 4), 0.5, dtype=torch.float64))
    assert Kind.SEVERAL_FIXED_POINTS in found.kinds


def test_the_caller_is_left_as_it_was() -> None:
    linear, x = layer(), torch.randn(4, 8, dtype=torch.float64)
    weights, state = linear.weight.detach().clone(), torch.get_rng_state()
    diagnose(lambda z: torch.tanh(linear(z) + x), torch.zeros_like(x), gradients=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(linear.weight, weights)
    assert all(p.grad is None for p in linear.parameters())
    assert not linear._forward_pre_hooks
    assert torch.is_grad_enabled()


def test_the_time_limit_is_kept_and_what_was_skipped_is_listed() -> None:
    import time

    def f(z: Tensor) -> Tensor:
        time.sleep(0.005)
        return 0.99 * z.flip(1) + 1

    began = time.monotonic()
    found = diagnose(f, torch.zeros(2, 4), seconds=0.4)
    assert time.monotonic() - began < 5
    assert any(trial.failure for trial in found.solvers) or found.skipped
    assert "time" in str(found).split("Recommendation")[1] or "time" in str(found.solvers)
    brief = diagnose(f, torch.zeros(2, 4), seconds=1e-3)
    assert brief.solvers == ()
    assert "too short" in str(brief)


def test_the_text_has_every_part_and_the_data_is_json() -> None:
    import json

    f, z0 = problems.tanh_layer()
    found = diagnose(f, z0, gradients=True)
    text = str(found)
    for part in ("4 samples of 16 numbers", "Solvers", "Gradients", "Cost of f", "eigenvalues",
                 "Recommendation", "flags:", "fixed_point_iter", "ift, gmres"):  # fmt: skip
        assert part in text
    assert max(map(len, text.splitlines())) <= 120
    data = json.loads(json.dumps(found.as_data(), allow_nan=False))
    assert {finding["kind"] for finding in data["findings"]} == {k.name for k in found.kinds}
    assert len(data["eigenvalues"]) == 4


def test_it_prints_with_and_without_rich(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchdeq.diagnostics import rendering

    f, z0 = problems.tanh_layer()
    found = diagnose(f, z0)
    found.show()
    assert "fixed_point_iter" in capsys.readouterr().out
    monkeypatch.setattr(rendering, "find_spec", lambda name: None)
    found.show()
    assert capsys.readouterr().out == f"{found}\n"


def test_a_tuple_state_with_args_and_several_dtypes_of_input() -> None:
    linear = layer()
    x = torch.randn(3, 8, dtype=torch.float64)

    def f(a: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(linear(b) + x), 0.5 * a

    found = doctor(f, (torch.zeros_like(x), torch.zeros_like(x)), (x,), config=REL, seconds=60.0)
    assert found.kinds == {Kind.CONTRACTION}
    assert found.subject.size == 16
