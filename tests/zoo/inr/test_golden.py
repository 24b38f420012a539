"""Against numbers of the original implementation, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deq_zoo.inr import FieldConfig, FitSignal, make_field
from deq_zoo.inr.model import OnePassField
from deq_zoo.inr.signal import psnr
from tests.golden import assert_matches, load_facts
from tests.zoo.inr.golden import MODELS, make_model, make_picture, read, read_config
from tests.zoo.inr.measure import measure
from tests.zoo.training import train
from torchdeq import DEQConfig, fp_correction, reset_norm


def compute_mse(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def compute_gradient_norms(field: nn.Module) -> dict[str, float]:
    return {name: float(p.grad.norm()) for name, p in field.named_parameters()}  # type: ignore[union-attr]


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_golden_tensors_are_reproduced(name: str) -> None:
    field, io = make_model(name).eval(), read(name)
    reset_norm(field)
    u = field.injection(io["x"])
    for k, part in enumerate(u):
        assert_matches(part, io[f"u.{k}"])
    for solving in (False, True):
        f = field.f.at(u, solving)
        assert_matches(f(io["z_in"]), io["f_z_in"])
        assert_matches(f(torch.zeros_like(u[0])), io["f_zero"])
    out = field(io["x"])
    assert out.stats is not None
    assert out.stats.converged.all()
    assert_matches(out.state, io["z_star"])
    assert_matches(out.prediction, io["output"])
    d, o, config = read_config(name)
    twin = OnePassField(d, o, config).double()
    twin.load_state_dict(field.state_dict())
    assert_matches(twin(io["x"]).prediction, io["one_pass_output"])
    parameters = load_facts("deq-inr")["files"][name]["num_params"]
    assert sum(p.numel() for p in field.parameters()) == parameters


@pytest.mark.parametrize("name", MODELS)
def test_golden_training_step_is_reproduced(name: str) -> None:
    field, io = make_model(name), read(name)
    reference = load_facts("deq-inr")["files"][name]["train_reference"]
    loss = compute_mse(field(io["x"]).prediction, io["target"])
    loss.backward()
    assert loss.item() == pytest.approx(reference["loss"], rel=1e-10)
    assert compute_gradient_norms(field) == pytest.approx(reference["grad_norm"], rel=1e-9)
    for key, first in reference["grad_first3"].items():
        grad = field.get_parameter(key).grad
        assert grad is not None
        assert grad.flatten()[:3].tolist() == pytest.approx(first, rel=1e-8, abs=1e-12)


def test_golden_fixed_point_correction_reaches_the_loss() -> None:
    field = make_model("siren_video_1L", n_states=2, f_max_iter=4, f_tol=0.0)
    io = read("siren_video_1L")
    reference = load_facts("deq-inr")["fixed_point_correction_reference"]
    out = field(io["x"])
    losses = [compute_mse(y, io["target"]).item() for y in out.predictions]
    assert losses == pytest.approx(reference["per_state_losses"], rel=1e-10)
    loss = fp_correction(compute_mse, (out.predictions, io["target"]), gamma=0.8)
    assert loss.item() == pytest.approx(reference["loss"], rel=1e-10)
    loss.backward()
    assert compute_gradient_norms(field) == pytest.approx(reference["grad_norm"], rel=1e-9)


@pytest.mark.parametrize(
    ("case", "warm"), [("image_warm_start", True), ("image_full_solve", False)]
)
@pytest.mark.parametrize("points_at_once", [0, 100])
def test_golden_training_trace_is_reproduced(case: str, warm: bool, points_at_once: int) -> None:
    expected = load_facts("deq-inr")["training_traces"][case]
    _, _, config = read_config("siren_image_1L")
    field = make_model("siren_image_1L", f_tol=1e-11)
    task = FitSignal(
        net=config, deq=DEQConfig(f_max_iter=400, f_tol=1e-11, grad=[3]), warm=warm,
        points_at_once=points_at_once,
    )  # fmt: skip
    task.__dict__["signal"] = make_picture()  # in place of a file
    losses = train(task, 30, lr=1e-3, model=field).losses
    assert losses == pytest.approx(expected["losses"], rel=1e-9)
    psnr_after = measure(task, field)["psnr"]
    assert psnr_after == pytest.approx(expected["eval_psnr_after"], rel=1e-9)


def test_golden_counts_of_the_presets_are_reproduced() -> None:
    for preset in load_facts("deq-inr")["presets"].values():
        config = FieldConfig(
            filter=preset["filter"], width=preset["hidden"], layers=preset["n_layers"]
        )
        with torch.device("meta"):
            counted = Counted(preset["in"], preset["out"], config).total
        assert counted == preset["num_params"]


class Counted:
    """Parameters by the formula of the specification."""

    def __init__(self, d: int, o: int, config: FieldConfig) -> None:
        C, L = config.width, config.layers
        filters = (L + 1) * C * (d + 1) * (2 if config.filter == "gabor" else 1)
        self.total = filters + L * (C * C + 2 * C) + o * C + o
        if C <= 256:  # and by building it
            with torch.device("cpu"):
                field = make_field(d, o, config)
            assert sum(p.numel() for p in field.parameters()) == self.total


@pytest.mark.slow
@pytest.mark.parametrize("case", range(8))
def test_golden_small_training_runs_are_reproduced(case: int) -> None:
    """Train from random starts in float32: means over three seeds agree within their spread."""
    facts = load_facts("deq-inr")["small_training_runs"]["runs"][case]
    image = read("small_images")[facts["image"]]
    psnrs = [_train(facts, image, seed) for seed in range(3)]
    mean = sum(psnrs) / len(psnrs)
    assert mean == pytest.approx(facts["test_psnr_mean"], abs=3 * facts["test_psnr_std"] + 0.3)


def _train(facts: Any, image: Tensor, seed: int) -> float:
    """Train as a recorded run was and return its PSNR on the test pixels."""
    from deq_zoo.inr import GeneraliseImage, Signal

    kind = GeneraliseImage if facts["task"] == "generalization" else FitSignal
    task = kind(
        net=FieldConfig(
            kind="deq" if facts["implicit"] else "one_pass", filter=facts["filter"],
            width=facts["hidden"], layers=facts["n_layers"], input_scale=facts["input_scale"],
        ),
        deq=DEQConfig(f_max_iter=100, grad=[3]), channels=image.shape[-1],
    )  # fmt: skip
    task.__dict__["signal"] = Signal("image", image)
    field = train(task, facts["iters"], lr=facts["lr"], seed=seed).model
    return measure(task, field)["psnr"]


def test_psnr_has_peak_one() -> None:
    a = torch.zeros(10)
    assert psnr(a, a + 0.1) == pytest.approx(20.0, rel=1e-6)
