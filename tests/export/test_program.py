"""Exported programs: models with solves in their forward, as one graph with an open batch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchdeq
from tests.problems import contraction
from tests.versions import needs_exported_loops
from torchdeq import Anderson, Broyden, FixedPointIter, SolverStat, Status, StopRule, export

pytestmark = needs_exported_loops
BATCHES = (1, 7, 64)

ROOT = Path(__file__).parents[2]


class Model(nn.Module):
    """A classifier with an encoder, a normalised map with dropout, a DEQ and a head."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.encode, self.f, self.head = nn.Linear(5, 12), nn.Linear(12, 12), nn.Linear(12, 3)
        self.drop = torchdeq.VariationalDropout(0.5)
        torchdeq.apply_norm(self.f, "spectral_norm", target_norm=0.8)
        given = {"f_solver": "anderson", "f_max_iter": 40, "f_tol": 1e-5, "f_stop_mode": "rel"}
        self.deq = torchdeq.get_deq(given | options)

    def forward(self, x: Tensor) -> Tensor:
        return self.solve(x)[0]

    def solve(self, x: Tensor) -> tuple[Tensor, SolverStat]:
        """Return the logits, and the statistics of the solve."""
        torchdeq.reset_norm(self.f)
        u = self.encode(x)
        (z,), stats = self.deq(lambda z: torch.tanh(self.drop(self.f(z)) + u), 0 * u)
        return self.head(z), stats


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture(scope="module")
def program(model: Model) -> Any:
    return export.export(model.train(), torch.randn(4, 5))


def test_a_model_with_norm_and_dropout_gives_its_own_answers(model: Model, program: Any) -> None:
    model.eval()
    for batch in BATCHES:
        x = 3 * torch.randn(batch, 5)
        with torch.no_grad():
            out = program.module()(x)
            logits, stats = model.solve(x)
        torch.testing.assert_close(out["output"], logits, atol=1e-5, rtol=1e-5)
        assert out["evaluations"] == stats.nfe
        assert out["steps"].tolist() == stats["nstep"].tolist()
        assert out["status"].tolist() == stats.status.tolist() == [0] * batch


def test_an_export_leaves_the_model_as_it_was(model: Model, program: Any) -> None:
    assert model.train().training
    names = {name for name, _ in model.named_parameters()}
    assert {"f.weight_orig", "f.weight_g"} <= names
    assert "weight" not in model.f._buffers
    model(torch.randn(3, 5)).sum().backward()
    assert model.f.weight_orig.grad is not None
    assert not any("weight_" in name for name in program.state_dict)


def test_later_changes_of_weights_do_not_reach_the_program() -> None:
    f, W, x = nn.Linear(4, 4), 0.3 * torch.eye(4), torch.randn(5, 4)
    f.weight.data *= 0.3
    f.other = f.weight  # a tied weight
    program = export.export(
        lambda z, x: torch.tanh(f(z) + z @ f.other + z @ W + x),
        torch.randn(2, 4),
        FixedPointIter(),
        StopRule(4),
        start=torch.zeros(2, 4),
        mode="unroll",
    )
    before = program.module()(torch.zeros(5, 4), x)["output"]
    with torch.no_grad():
        f.weight.zero_()
        W.zero_()
    assert torch.equal(program.module()(torch.zeros(5, 4), x)["output"], before)
    assert f.weight.requires_grad


class Nested(nn.Module):
    """A solve whose map solves."""

    def forward(self, x: Tensor) -> Tensor:
        def f(z: Tensor) -> Tensor:
            y = torchdeq.solve(
                lambda y: torch.tanh(0.5 * y + z), 0 * z, FixedPointIter(), StopRule(2, None)
            ).z
            return 0.3 * y + x

        z: Tensor = torchdeq.solve(f, 0 * x, FixedPointIter(), StopRule(2, None)).z
        return z


def test_a_solve_inside_of_f_is_unrolled_or_an_error() -> None:
    model, x = Nested(), torch.randn(5, 3)
    # In a process of its own: after a loop that torch cannot trace, solves keep one state longer.
    program = (
        "import torch; from tests.export.test_program import Nested; from torchdeq import export; "
        "export.export(Nested(), torch.randn(2, 3))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert "RuntimeError: f cannot be traced whole" in done.stderr
    assert "a solve inside of f needs mode='unroll'" in done.stderr
    out = export.export(model, torch.randn(2, 3), mode="unroll").module()(x)
    torch.testing.assert_close(out["output"], model(x), atol=1e-6, rtol=0)
    assert {"status_0", "status_1", "status_2"} <= set(out)


def test_a_program_is_saved_and_loaded(model: Model, program: Any, tmp_path: Path) -> None:
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    x = torch.randn(6, 5)
    expected = program.module()(x)
    out = loaded.module()(x)
    assert list(out) == list(expected) == ["output", "status", "steps", "residual", "evaluations"]
    torch.testing.assert_close(out, expected)


class TwoSolves(nn.Module):
    """Two solves in a row, one by plain iteration on a pair of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(contraction(0.6, 6).float())

    def forward(self, x: Tensor) -> dict[str, Any]:
        def f(v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            return torch.tanh(v @ self.W + x), torch.cos(w + 0.1 * v)

        stop = StopRule(50, 1e-4)
        start = (torch.zeros_like(x), torch.zeros_like(x))
        first = torchdeq.solve(f, start, FixedPointIter(), stop, on_failure="ignore")
        second = torchdeq.fixed_point(
            lambda z: torch.sin(0.5 * z + first.z[1]), x, stop=stop, coupled=True
        )
        return {"pair": first.z, "last": second.z, "stats": second.stats}


@pytest.mark.slow
def test_several_solves_report_each() -> None:
    model, x = TwoSolves().eval(), torch.randn(5, 6)
    out = export.export(model, x).module()(x)
    assert list(out)[:3] == ["pair_0", "pair_1", "last"]
    assert {"status_0", "status_1", "evaluations_1"} <= set(out)
    with torch.no_grad():
        own = model(x)
    torch.testing.assert_close(out["pair_1"], own["pair"][1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out["last"], own["last"], atol=1e-5, rtol=1e-5)


def test_a_map_is_exported_with_its_start() -> None:
    W = contraction(0.7, 6).float()

    def f(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ W + x)

    stop = StopRule(60, 1e-5, "rel")
    z0, x = torch.zeros(3, 6), torch.randn(3, 6)
    program = export.export(f, x, FixedPointIter(), stop, start=z0)
    x = torch.randn(7, 6) * torch.logspace(-2, 1, 7)[:, None]
    own = torchdeq.solve(f, torch.zeros(7, 6), FixedPointIter(), stop, args=(x,))
    out = program.module()(torch.zeros(7, 6), x)
    torch.testing.assert_close(out["output"], own.z, atol=1e-5, rtol=1e-5)
    assert out["evaluations"] == own.stats.nfe
    assert out["steps"].tolist() == own.stats["nstep"].tolist()


def test_a_spent_budget_and_a_divergent_sample_are_reported() -> None:
    scale = torch.tensor([0.5, 0.99, 3.0])

    def f(z: Tensor, s: Tensor) -> Tensor:
        return s[:, None] * z + 1

    program = export.export(f, scale, FixedPointIter(), StopRule(30, 1e-6), start=torch.ones(3, 2))
    out = program.module()(torch.ones(3, 2), scale)
    assert out["status"].tolist() == [Status.CONVERGED, Status.MAX_ITER, Status.DIVERGED]
    assert out["evaluations"] == 30


def test_an_unrolled_budget_without_a_solve_is_exported() -> None:
    model = Model(f_max_iter=0, grad=[5], tau=0.7).eval()
    x = torch.randn(3, 5)
    out = export.export(model, x).module()(x)
    with torch.no_grad():
        torch.testing.assert_close(out["output"], model(x), atol=1e-6, rtol=1e-5)


def test_other_solvers_are_named_in_the_error() -> None:
    model, x = Model(f_solver="broyden"), torch.randn(3, 5)
    with pytest.raises(ValueError, match=r"Broyden cannot be exported.*Anderson"):
        export.export(model, x)
    with pytest.raises(ValueError, match="Broyden cannot be exported"):
        export.export(model, x, solver=Broyden())
    stop = StopRule(8, 1e-2, "rel")
    program = export.export(model, x, Anderson(m=2), stop, mode="unroll")
    assert "while_loop" not in str(program.graph)
    with torch.no_grad():
        out = program.module()(x)
        torch.testing.assert_close(out["output"], model.eval()(x), atol=0.05, rtol=0.05)
    assert out["evaluations"] == 8


@pytest.mark.parametrize("shapes", [None, (None,)])
def test_a_spectral_radius_is_refused_by_name(shapes: Any) -> None:
    with pytest.raises(ValueError, match=r"spectral radii cannot be exported.*sradius_mode"):
        export.export(Model(sradius_mode=True), torch.randn(4, 5), dynamic_shapes=shapes)


def test_mistakes_of_the_caller_are_explained() -> None:
    model = Model()
    with pytest.raises(ValueError, match="batch of 2 or more"):
        export.export(model, torch.randn(1, 5))
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        export.export(torch.cos, torch.randn(3, 5))
    with pytest.raises(ValueError, match="unknown mode 'lop'"):
        export.export(model, torch.randn(3, 5), mode="lop")
    with pytest.raises(TypeError, match="takes 1"):
        export.export(model, (torch.randn(3, 5), torch.randn(3, 5)))
    with pytest.raises(ValueError, match=r"ends with \.pt2"):
        export.to_aoti(None, "model.so")  # type: ignore[arg-type]


class ReturnsObject(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return object()


def test_a_model_must_return_tensors() -> None:
    with pytest.raises(TypeError, match="returns object: wrap it"):
        export.export(ReturnsObject(), torch.randn(3, 5))
