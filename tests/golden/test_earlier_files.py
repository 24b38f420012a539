"""Run folders and weights that an earlier version wrote still load and give its numbers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import deq_zoo
from deq_zoo.cli import main
from deq_zoo.evaluate import evaluate
from deq_zoo.run import Run
from tests.golden import FOLDER, assert_matches, load_facts, load_tensors
from torchdeq import apply_norm, get_deq, reset_norm

RUNS = ["diffusion-smoke", "ignn-smoke", "inr-smoke", "lm-smoke", "mdeq-smoke"]
# Other processors sum in another order, which training in float32 enlarges; an error of rounding
# among the metrics (of about 1e-7) is no more than the absolute part.
ROUNDING: dict[str, Any] = {"rel": 1e-3, "abs": 1e-5}
# Metrics that have another name now, by run.
RENAMED: dict[str, dict[str, str]] = {
    "diffusion-smoke": {"val_loss": "loss"},
    "mdeq-smoke": {"test_loss": "loss"},
}


def copy_run(name: str, tmp_path: Path) -> tuple[Path, Any]:
    """Copy a run that stopped at step 8 of 12; return the folder and the earlier numbers."""
    folder = Path(shutil.copytree(FOLDER / "runs" / name, tmp_path / name))
    return folder, load_facts(f"runs/{name}", "expected")


def evaluate_test(task: Any, model: Any) -> tuple[dict[str, float], dict[str, Any]]:
    """Return metrics and solver statistics of the test set."""
    result = evaluate(task, model, "test")
    return dict(result.metrics), result.solver.summary()


def evaluate_both(task: Any, model: Any) -> tuple[dict[str, float], dict[str, Any]]:
    """Return metrics of both splits by earlier names, e.g. `val_accuracy`, and joint statistics."""
    val, test = (evaluate(task, model, split) for split in ("val", "test"))
    metrics = {f"val_{name}": value for name, value in val.metrics.items()}
    metrics |= {f"test_{name}": value for name, value in test.metrics.items()}
    both = val.solver.summary(), test.solver.summary()
    assert val.solver.samples == test.solver.samples  # so the mean of means is the mean
    numbers = [name for name, value in both[0].items() if isinstance(value, float)]
    return metrics, {name: (both[0][name] + both[1][name]) / 2 for name in numbers}


def evaluate_val(task: Any, model: Any) -> tuple[dict[str, float], dict[str, Any]]:
    """Return metrics and solver statistics of the validation set."""
    result = evaluate(task, model, "val")
    return dict(result.metrics), result.solver.summary()


#: How to evaluate runs whose earlier numbers have other names, or are not of the test set alone.
EVALUATIONS = {
    "ignn-smoke": evaluate_both,
    "lm-smoke": evaluate_val,
}


@pytest.mark.parametrize(
    ("name", "weights"),
    [("ignn-smoke", "best"), *((name, "last") for name in RUNS if name != "inr-smoke")],
)
def test_an_earlier_run_evaluates_as_before(name: str, weights: str, tmp_path: Path) -> None:
    folder, expected = copy_run(name, tmp_path)
    model = deq_zoo.load(folder, best=weights == "best")
    task: Any = model.preset.task  # type: ignore[union-attr]
    metrics, summary = EVALUATIONS.get(name, evaluate_test)(task, model)
    renamed = RENAMED.get(name, {})
    earlier = {renamed.get(k, k): v for k, v in expected[weights]["metrics"].items()}
    assert metrics == pytest.approx(earlier, **ROUNDING)
    solver = {k: v for k, v in summary.items() if k in expected[weights]["solver"]}
    assert solver == pytest.approx(expected[weights]["solver"], **ROUNDING)


def test_an_earlier_duel_of_fields_evaluates_as_before(tmp_path: Path) -> None:
    """Compare the PSNR of each split: earlier, one evaluation had both, by other names."""
    folder, expected = copy_run("inr-smoke", tmp_path)
    model = deq_zoo.load(folder, best=False)
    task: Any = model.preset.task  # type: ignore[union-attr]
    before = expected["last"]["metrics"]
    test, val = evaluate(task, model, "test"), evaluate(task, model, "val")
    assert test.metrics["psnr"] == pytest.approx(before["psnr"], **ROUNDING)
    assert test.metrics["rival_psnr"] == pytest.approx(before["rival_psnr"], **ROUNDING)
    assert val.metrics["psnr"] == pytest.approx(before["val_psnr"], **ROUNDING)
    solver, earlier = test.solver.summary(), expected["last"]["solver"]
    assert solver["spectral_radius"] == pytest.approx(earlier["spectral_radius"], **ROUNDING)
    assert solver["nfe"] == pytest.approx(earlier["nfe"], abs=1)  # the mean was over more pixels


@pytest.mark.parametrize("name", RUNS)
def test_an_earlier_run_resumes_as_before(name: str, tmp_path: Path) -> None:
    folder, expected = copy_run(name, tmp_path)
    options = ["--resume", "--quiet", "--cpu", "--no-report"]
    assert main(["train", name, "--out", str(folder), *options]) == 0
    run = Run.open(folder)
    assert run.checkpoint().step == expected["resumed"]["step"] == 12
    *_, line = run.lines("train")
    assert line["loss"] == pytest.approx(expected["resumed"]["loss"], **ROUNDING)


def test_the_configuration_of_an_earlier_flow_run_builds_the_same_model() -> None:
    """Compare names and shapes: the weights of the smallest flow model are too large to keep."""
    preset = Run.open(FOLDER / "runs" / "flow-smoke").preset()
    shapes = {k: list(v.shape) for k, v in preset.task.build().state_dict().items()}
    assert shapes == load_facts("runs/flow-smoke", "shapes")


class Layer(nn.Module):
    """A contraction with both norms, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.inject = nn.Linear(4, 6)
        self.expand, self.contract = nn.Linear(6, 8), nn.Linear(8, 6)
        self.double()
        apply_norm(self.expand, "weight_norm")
        apply_norm(self.contract, "spectral_norm", target_norm=0.5)
        self.deq = get_deq(f_solver="anderson", f_max_iter=100, f_tol=1e-12, f_stop_mode="rel")

    def forward(self, x: Tensor) -> Tensor:
        reset_norm(self)
        u = self.inject(x)
        (z,), _ = self.deq(lambda z: torch.tanh(self.contract(self.expand(z)) + u), u)
        return z


def test_an_earlier_state_dict_loads_and_computes_the_same() -> None:
    io = load_tensors("torchdeq", "io", torch.float64)
    layer = Layer()
    layer.load_state_dict(load_tensors("torchdeq", "state_dict"), strict=True)
    assert_matches(layer.eval()(io["x"]), io["evaluated"])
    z = layer.train()(io["x"])  # after one more power iteration
    z.square().sum().backward()
    assert_matches(z, io["trained"])
    gradients = [p.grad for p in layer.parameters() if p.grad is not None]
    assert_matches(parameters_to_vector(gradients), io["gradient"])
