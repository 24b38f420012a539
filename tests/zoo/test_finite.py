"""Nothing that is not finite is saved, evaluated, returned or used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import deq_zoo
from deq_zoo.checkpoint import Checkpoint
from deq_zoo.cli import main
from deq_zoo.errors import CheckpointError, ZooError
from deq_zoo.evaluate import evaluate
from deq_zoo.finite import all_finite, find_not_finite, not_finite_by_design
from deq_zoo.optim import SGD
from deq_zoo.training import train_changed
from deq_zoo.weights import load_weights
from tests.zoo.toy import Toy, toy

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("log_every", [1, 100])
@pytest.mark.parametrize("eval_every", [1, 100])
def test_a_run_that_diverges_ends_with_its_last_good_checkpoint(
    tmp_path: Path, log_every: int, eval_every: int
) -> None:
    optim = SGD(lr=1e30)
    with pytest.raises(ZooError) as error:
        train_changed(
            "toy",
            lambda p: replace(
                p, optim=optim, log_every=log_every, eval_every=eval_every, save_every=7
            ),
            out=tmp_path / "run", quiet=True, cpu=True, report=False,
        )  # fmt: skip
    assert "lower the learning rate (--set lr=...), clip the gradient" in str(error.value)
    assert "last.safetensors is from step 0 and finite" in str(error.value)
    for file in (tmp_path / "run").glob("*.safetensors"):
        assert all_finite(Checkpoint.load(file).model)
    assert deq_zoo.load(tmp_path / "run") is not None


def test_a_fit_that_diverges_is_an_error() -> None:
    for log_every in (1, 100):
        with pytest.raises(ZooError, match=r"at step \d+: lower the learning rate"):
            deq_zoo.fit(replace(toy(), optim=SGD(lr=1e30), log_every=log_every))


def test_weights_that_overflow_in_the_last_update_are_not_returned() -> None:
    # The loss of the last step was computed before its update.
    with pytest.raises(ZooError, match=r"weight holds NaN or infinity at step 1: lower the"):
        deq_zoo.fit(replace(toy(), optim=SGD(lr=3e38), steps=1))


def test_a_checkpoint_with_nan_is_neither_resumed_nor_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = deq_zoo.train("toy", out=tmp_path / "run", quiet=True, cpu=True, report=False).run
    checkpoint = Checkpoint.load(run.last)
    checkpoint.model["f.weight"][0, 0] = NAN
    checkpoint.save(run.last)
    run.best.unlink()
    message = "f.weight in .* holds NaN or infinity: the training that wrote it diverged"
    with pytest.raises(CheckpointError, match=message):
        deq_zoo.load(run.path)
    with pytest.raises(CheckpointError, match=message):
        deq_zoo.train("toy", out=run.path, quiet=True, cpu=True, resume=True, steps=30)
    released = {k.replace("f.", "linear."): v for k, v in checkpoint.model.items()}
    torch.save(released, tmp_path / "released.pth")
    for command in (
        ["evaluate", str(run.path), "--cpu"],
        ["predict", str(run.path), str(run.config), "--cpu"],
        ["sample", str(run.path), "--cpu"],
        ["convert", str(tmp_path / "released.pth"), "--preset", "toy"],
    ):
        assert main(command) == 2
        assert "f.weight" in capsys.readouterr().err
    assert not (tmp_path / "released.safetensors").exists()


def test_a_model_that_is_not_finite_is_not_evaluated() -> None:
    model = toy().task.build()
    with torch.no_grad():
        model.out.bias.fill_(INF)  # type: ignore[union-attr, operator]
    with pytest.raises(ZooError, match=r"the parameter out\.bias holds NaN or infinity"):
        evaluate(toy().task, model)


def test_an_optimiser_that_overflows_ends_the_run(tmp_path: Path) -> None:
    original = Toy.loss

    def loss(self: Toy, model: Any, batch: Any, carry: Any) -> Any:
        result = original(self, model, batch, carry)
        scaled = result.value.detach() + 1e25 * (result.value - result.value.detach())
        return replace(result, value=scaled)  # the square of the gradient is infinite

    with patch.object(Toy, "loss", loss), pytest.raises(ZooError, match="optimiser's state holds"):
        deq_zoo.train("toy", out=tmp_path / "run", quiet=True, cpu=True, steps=2)


def test_a_score_that_is_not_finite_is_not_best_and_not_silent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    original = Toy.evaluate

    def nan(*args: Any) -> Any:
        return replace(original(*args), metrics={"mse": NAN})

    with patch.object(Toy, "evaluate", nan):
        run = deq_zoo.train("toy", out=tmp_path / "run", quiet=True, cpu=True, report=False).run
    assert not run.best.exists()
    assert "mse is not finite at step 8" in caplog.text


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.register_buffer("mask", torch.tensor([0.0, -INF]))
        self.register_buffer("count", torch.tensor([1, 2]))


def test_infinities_by_design_are_no_fault() -> None:
    model = Masked()
    assert not_finite_by_design(model) == {"mask"}
    load_weights(Masked(), model.state_dict(), "it")
    assert find_not_finite(model, {"mask"}) is None
    for name in ("linear.weight", "norm.running_var"):
        for value in (NAN, INF, -INF):
            broken = {key: t.clone() for key, t in model.state_dict().items()}
            broken[name].view(-1)[0] = value
            with pytest.raises(CheckpointError, match=f"^{name} in it holds NaN or infinity"):
                load_weights(Masked(), broken, "it")
