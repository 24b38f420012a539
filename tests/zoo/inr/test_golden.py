"""Against numbers of the original implementation, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deq_zoo.inr import FieldConfig, FitSignal, make_field
from deq_zoo.inr.model import OnePassField
from deq_zoo.inr.signal import psnr
from deq_zoo.task import Shard
from tests.golden import assert_matches, load_facts
from tests.zoo.inr.golden import MODELS, make_model, make_picture, read, read_config
from torchdeq import DEQConfig, fp_correction, reset_norm


def mse(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def gradient_norms(field: nn.Module) -> dict[str, float]:
    return {name: float(p.grad.norm()) for name, p in field.named_parameters()}  # type: ignore[union-attr]


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_golden_tensors(name: str) -> None:
    field, told = make_model(name).eval(), read(name)
    reset_norm(field)
    u = field.injection(told["x"])
    for k, part in enumerate(u):
        assert_matches(part, told[f"u.{k}"])
    for solving in (False, True):
        f = field.f.at(u, solving)
        assert_matches(f(told["z_in"]), told["f_z_in"])
        assert_matches(f(torch.zeros_like(u[0])), told["f_zero"])
    out = field(told["x"])
    assert out.stats is not None
    assert out.stats.converged.all()
    assert_matches(out.state, told["z_star"])
    assert_matches(out.values[0], told["output"])
    d, o, config = read_config(name)
    twin = OnePassField(d, o, config).double()
    twin.load_state_dict(field.state_dict())
    assert_matches(twin(told["x"]).values[0], told["one_pass_output"])
    parameters = load_facts("deq-inr")["files"][name]["num_params"]
    assert sum(p.numel() for p in field.parameters()) == parameters


@pytest.mark.parametrize("name", MODELS)
def test_golden_training_step(name: str) -> None:
    field, told = make_model(name), read(name)
    reference = load_facts("deq-inr")["files"][name]["train_reference"]
    loss = mse(field(told["x"]).values[-1], told["target"])
    loss.backward()
    assert loss.item() == pytest.approx(reference["loss"], rel=1e-10)
    assert gradient_norms(field) == pytest.approx(reference["grad_norm"], rel=1e-9)
    for key, first in reference["grad_first3"].items():
        grad = field.get_parameter(key).grad
        assert grad is not None
        assert grad.flatten()[:3].tolist() == pytest.approx(first, rel=1e-8, abs=1e-12)


def test_golden_fixed_point_correction_reaches_the_loss() -> None:
    field = make_model("siren_video_1L", n_states=2, f_max_iter=4, f_tol=0.0)
    told = read("siren_video_1L")
    reference = load_facts("deq-inr")["fixed_point_correction_reference"]
    out = field(told["x"])
    losses = [mse(y, told["target"]).item() for y in out.values]
    assert losses == pytest.approx(reference["per_state_losses"], rel=1e-10)
    loss = fp_correction(mse, (out.values, told["target"]), gamma=0.8)
    assert loss.item() == pytest.approx(reference["loss"], rel=1e-10)
    loss.backward()
    assert gradient_norms(field) == pytest.approx(reference["grad_norm"], rel=1e-9)


@pytest.mark.parametrize(
    ("case", "warm"), [("image_warm_start", True), ("image_full_solve", False)]
)
@pytest.mark.parametrize("points_at_once", [0, 100])
def test_golden_training_trace(case: str, warm: bool, points_at_once: int) -> None:
    told = load_facts("deq-inr")["training_traces"][case]
    _, _, config = read_config("siren_image_1L")
    field = make_model("siren_image_1L", f_tol=1e-11)
    task = FitSignal(
        net=config, deq=DEQConfig(f_max_iter=400, f_tol=1e-11, grad=[3]), warm=warm,
        points_at_once=points_at_once,
    )  # fmt: skip
    task.__dict__["signal"] = make_picture()  # in place of a file
    optimizer = torch.optim.Adam(field.parameters(), lr=1e-3)
    losses, carry = list[float](), None
    for step in range(30):
        loss = task.loss(field, task.train_batch(step, 0, Shard()), carry)
        carry = loss.carry
        optimizer.zero_grad()
        loss.value.backward()
        optimizer.step()
        losses.append(loss.value.item())
    assert losses == pytest.approx(told["losses"], rel=1e-9)
    with torch.no_grad():
        found = task.evaluate(field.eval(), torch.device("cpu"), False)
    assert found.metrics["psnr"] == pytest.approx(told["eval_psnr_after"], rel=1e-9)


def test_golden_counts_of_the_presets() -> None:
    for told in load_facts("deq-inr")["presets"].values():
        config = FieldConfig(filter=told["filter"], width=told["hidden"], layers=told["n_layers"])
        with torch.device("meta"):
            counted = Counted(told["in"], told["out"], config).total
        assert counted == told["num_params"]


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
def test_golden_small_training_runs(case: int) -> None:
    """From a random start, in float32, over three seeds: means agree within what seeds do."""
    told = load_facts("deq-inr")["small_training_runs"]["runs"][case]
    image = read("small_images")[told["image"]]
    found = [_trained(told, image, seed) for seed in range(3)]
    mean = sum(found) / len(found)
    assert mean == pytest.approx(told["test_psnr_mean"], abs=3 * told["test_psnr_std"] + 0.3)


def _trained(told: Any, image: Tensor, seed: int) -> float:
    from deq_zoo.inr import GeneraliseImage, Signal

    kind = GeneraliseImage if told["task"] == "generalization" else FitSignal
    task = kind(
        net=FieldConfig(
            kind="deq" if told["implicit"] else "one_pass", filter=told["filter"],
            width=told["hidden"], layers=told["n_layers"], input_scale=told["input_scale"],
        ),
        deq=DEQConfig(f_max_iter=100, grad=[3]), channels=image.shape[-1],
    )  # fmt: skip
    task.__dict__["signal"] = Signal("image", image)
    torch.manual_seed(seed)
    field, carry = task.build(), None
    optimizer = torch.optim.Adam(field.parameters(), lr=told["lr"])
    for step in range(told["iters"]):
        loss = task.loss(field, task.train_batch(step, 0, Shard()), carry)
        carry = loss.carry
        optimizer.zero_grad()
        loss.value.backward()
        optimizer.step()
    with torch.no_grad():
        return task.evaluate(field.eval(), torch.device("cpu"), False).metrics["psnr"]


def test_psnr_has_peak_one() -> None:
    a = torch.zeros(10)
    assert psnr(a, a + 0.1) == pytest.approx(20.0, rel=1e-6)
