"""The doctor on models of the zoo, and the command `deq-zoo doctor`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from deq_zoo.cli import main
from deq_zoo.mdeq import MDEQClassifier
from deq_zoo.mdeq.config import MDEQConfig
from tests.zoo.lm.nets import draw_ids, make_model
from tests.zoo.toy import Toy
from torchdeq.diagnostics import Kind, find_solves

SECONDS = 60.0


def test_the_redesigned_transformer_has_no_fixed_point() -> None:
    (found,) = find_solves(make_model("redesigned"), draw_ids())
    diagnosis = found.doctor(seconds=SECONDS, solvers=["broyden"], budget=60)
    assert Kind.NO_FIXED_POINT in diagnosis.kinds
    assert not diagnosis.kinds & {Kind.COUPLED, Kind.RANDOM, Kind.LOW_PRECISION}
    assert "--f_max_iter 0" in diagnosis.recommendation.flags
    assert diagnosis.jacobian is not None
    assert diagnosis.jacobian.directions is not None
    assert float(diagnosis.jacobian.directions.values.max()) < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("design", ["original", "convergent"])
def test_the_other_transformers_have_one(design: str) -> None:
    (found,) = find_solves(make_model(design), draw_ids())
    diagnosis = found.doctor(seconds=SECONDS)
    assert not diagnosis.kinds & {Kind.NO_FIXED_POINT, Kind.UNSOLVED, Kind.NEARLY_SINGULAR}
    assert any(trial.solved for trial in diagnosis.solvers)


def test_mdeq_at_its_start_does_not_contract_but_broyden_solves_it() -> None:
    torch.manual_seed(0)
    config = MDEQConfig(
        channels=(8, 8), expansion=1, groups=2, in_channels=1, head_channels=(2, 2),
        final_channels=8, classes=4,
    )  # fmt: skip
    deq = {"f_max_iter": 22, "f_tol": 1e-2, "f_stop_mode": "rel", "f_solver": "broyden", "grad": 5}
    model = MDEQClassifier(config, deq).train()
    (found,) = find_solves(model, torch.randn(2, 1, 8, 8))
    diagnosis = found.doctor(
        seconds=SECONDS, solvers=["fixed_point_iter"], budget=100, gradients=False
    )
    assert {Kind.NOT_CONTRACTING, Kind.BUDGET_TOO_SMALL} <= diagnosis.kinds
    own, plain = diagnosis.solvers
    assert own.solved
    assert not plain.solved
    assert not diagnosis.kinds & {
        Kind.NO_FIXED_POINT, Kind.BATCH_STATISTICS, Kind.COUPLED, Kind.RANDOM, Kind.STALE_NORM,
        Kind.WRITES_IN_PLACE, Kind.IGNORES_STATE, Kind.LOW_PRECISION,
    }  # fmt: skip


def test_a_run_is_examined_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = tmp_path / "run", tmp_path / "pictures"
    train = ["train", "toy", "--out", str(run), "--cpu", "--quiet", "--no-report"]
    assert Toy.score.name == "mse"  # its import registers the preset
    assert main([*train, "--set", "steps=4"]) == 0
    capsys.readouterr()
    command = ["doctor", str(run), "--cpu", "--seconds", "20"]
    assert main([*command, "--json", "--out", str(out)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["layer"] == "deq"
    assert [finding["kind"] for finding in data["findings"]] == ["CONTRACTION"]
    names = {path.name for path in out.iterdir()}
    drawn = {f"deq-{n}.png" for n in ("solvers", "residuals", "evaluations", "eigenvalues")}
    assert names == drawn | {"doctor.jsonl"}
    assert main([*command, "--out", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err
