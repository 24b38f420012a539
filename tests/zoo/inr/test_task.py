"""Tasks and presets: what is learnt, evaluated, drawn, rendered, saved and resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import deq_zoo.inr.presets  # noqa: F401
from deq_zoo.cli import main
from deq_zoo.errors import ZooError
from deq_zoo.inr import (
    FieldConfig,
    FitSignal,
    GeneraliseImage,
    Signal,
)
from deq_zoo.inr.readers import read_image
from deq_zoo.inr.shape_task import FitShape
from deq_zoo.preset import find_preset
from tests.zoo.inr.measure import measure
from tests.zoo.inr.resuming import assert_resumes_bit_for_bit
from tests.zoo.training import train
from torchdeq import DEQConfig

NET = FieldConfig(width=16, input_scale=8.0)
RECIPE = DEQConfig(f_max_iter=40, f_tol=1e-4, grad=[3], on_failure="ignore")
EXACT = DEQConfig(
    ift=True, higher_order=True, f_tol=1e-5, b_tol=1e-5, f_stop_mode="rel", on_failure="ignore"
)


def test_presets_have_the_papers_numbers_of_parameters() -> None:
    for name, count in (("inr-nature", 267_779), ("inr-text", 267_779), ("inr-audio", 265_729)):
        model = find_preset(name).task.build()  # without data
        assert sum(p.numel() for p in model.parameters()) == count
    video = find_preset("inr-video")
    assert isinstance(video.task, FitSignal)
    assert video.task.deq.n_states == 2
    with torch.device("meta"):
        made = video.task.make_field(video.task.net)
    assert sum(p.numel() for p in made.parameters()) == 4_220_931


def test_the_smoke_preset_trains_reports_and_renders(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "run"
    assert main(["train", "inr-smoke", "--cpu", "--out", str(out)]) == 0
    assert "psnr" in capsys.readouterr().out
    assert "<h2>Examples</h2>" in (out / "report.html").read_text()
    assert (out / "pictures" / "fit.png").exists()
    assert main(["evaluate", str(out), "--cpu"]) == 0
    capsys.readouterr()
    assert main(["sample", str(out), "--cpu", "--scale", "4", "--out", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "64 x 64" in output
    assert "float16" in output
    assert "bits per pixel" in output
    assert read_image(tmp_path / "image.png").shape == (64, 64, 3)


@pytest.mark.parametrize("batch", [0, 60])
def test_a_run_resumes_bit_for_bit(tmp_path: Path, batch: int) -> None:
    assert_resumes_bit_for_bit("inr-smoke", ["--set", f"batch={batch}"], tmp_path)


@pytest.mark.parametrize("kind", ["deq", "one_pass", "siren", "ffn", "relu_pe", "mfn"])
def test_every_kind_learns_an_image(kind: Any) -> None:
    scale = {"ffn": 1.0, "relu_pe": 4.0}.get(kind, 8.0)
    filter: Any = "fourier" if kind == "mfn" else "siren_like"
    net = replace(NET, kind=kind, filter=filter, input_scale=scale)
    task = FitSignal(net=net, deq=RECIPE if kind == "deq" else DEQConfig(), data="ripples")
    model, losses, _ = train(task, 60, lr=1e-2)
    assert losses[-1] < 0.4 * losses[0]
    metrics = measure(task, model, thorough=True)
    assert metrics["psnr"] > 15
    assert [p.name for p in task.pictures(model)] == ["fit"]


def test_warm_steps_follow_the_fixed_points_of_a_solve() -> None:
    warm = FitSignal(net=NET, deq=RECIPE, data="ripples")
    solved = replace(warm, warm=False)
    a, warm_losses, carry = train(warm, 40, lr=5e-3)
    b, losses, none = train(solved, 40, lr=5e-3)
    assert none is None
    assert carry["kept"].shape == (256, 16)
    assert warm_losses[-1] == pytest.approx(losses[-1], rel=0.05)
    psnr = measure(warm, a, thorough=True)["psnr"]
    assert psnr == pytest.approx(measure(solved, b, thorough=True)["psnr"], abs=0.5)


def test_sampled_points_are_solved_once_and_then_followed() -> None:
    task = FitSignal(net=NET, deq=RECIPE, data="ripples", batch=100)
    torch.manual_seed(0)
    model = task.build()
    carry, solves = None, []
    for step in range(6):  # an epoch is three batches
        loss = task.loss(model, task.train_batch(step, 0), carry)
        carry = loss.carry
        solves.append(loss.stats is not None)
    assert solves == [True] * 3 + [False] * 3
    assert carry is not None
    assert bool(carry["seen"].all())
    assert task.steps_per_epoch == 3


@pytest.mark.parametrize("points_at_once", [1, 37, 256, 1000])
def test_blocks_change_nothing_but_rounding(points_at_once: int) -> None:
    task = FitSignal(net=NET, deq=RECIPE.with_options(n_states=2), data="ripples", warm=False)
    torch.manual_seed(0)
    model = task.build().double()
    batch = torch.arange(0, 256, 5 if points_at_once == 1 else 1)
    grads = []
    for each in (task, replace(task, points_at_once=points_at_once)):
        model.zero_grad()
        loss = each.loss(model, batch, None)
        loss.value.backward()
        grads.append([loss.value.detach(), *(p.grad for p in model.parameters())])
    for a, b in zip(*grads, strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-6)  # blocks stop when their own points have converged


def test_the_correction_reaches_the_loss_with_its_weight() -> None:
    deq = RECIPE.with_options(n_states=2, f_max_iter=4, f_tol=0.0, gamma=0.3)
    task = FitSignal(net=NET, deq=deq, data="ripples", warm=False)
    torch.manual_seed(0)
    model = task.build()
    batch = task.train_batch(0, 0)
    from deq_zoo.inr import coordinates

    out = model(coordinates(task.signal.shape, batch))
    errors = [(v - task.signal.targets(batch)).square().mean() for v in out.predictions]
    assert_close(task.loss(model, batch, None).value, 0.3 * errors[0] + errors[1])


def test_generalisation_splits_the_pixels_in_three() -> None:
    task = GeneraliseImage(net=NET, deq=RECIPE, data="ripples")
    fit, val, test = (data.rows for data in (task.train_set, task.val_set, task.test_set))
    assert len(fit) == len(val) == len(test) == 64
    assert len(torch.cat((fit, val, test)).unique()) == 192
    assert fit[:3].tolist() == [0, 2, 4]
    assert test[:2].tolist() == [17, 19]
    assert val[:2].tolist() == [1, 3]
    model = train(task, 80, lr=1e-2).model
    assert measure(task, model, thorough=True)["psnr"] > 12
    assert measure(task, model, "val").keys() == {"psnr"}
    sound = GeneraliseImage(net=NET, deq=RECIPE).with_signal(Signal("audio", torch.zeros(4, 1)))
    with pytest.raises(ZooError, match="pixels of an image"):
        _ = sound.train_set


def test_an_image_from_its_gradients() -> None:
    net = FieldConfig(width=32, input_scale=4.0)
    task = FitSignal(
        net=net, deq=EXACT, data="ripples", channels=1, warm=False, supervise="gradient"
    )
    model, losses, _ = train(task, 25, lr=2e-2)
    assert losses[-1] < 0.5 * losses[0]
    untrained = measure(task, task.build(), thorough=True)["psnr"]
    assert measure(task, model, thorough=True)["psnr"] > untrained + 2
    assert task.pictures(model)


@pytest.mark.parametrize("shape", ["disc", "sphere"])
def test_a_shape_from_its_distances(shape: Any) -> None:
    task = FitShape(net=FieldConfig(width=32, input_scale=2.0), deq=EXACT, shape=shape, batch=128)
    model, losses, _ = train(task, 25, lr=2e-2)
    metrics = measure(task, model, thorough=True)
    assert losses[-1] < 0.5 * losses[0]
    assert metrics["distance_error"] < 0.15
    assert task.pictures(model)


def test_tasks_that_cannot_be_say_why() -> None:
    for options, message in (
        ({"batch": -1}, "batch must be at least 0"),
        ({"shrink": 0}, "shrink must be at least 1"),
        ({"channels": 2}, "channels must be 1 or 3"),
        ({"supervise": "gradient"}, "ift=True, higher_order=True and warm=False"),
        ({"deq": DEQConfig(jac_loss_weight=1.0)}, "jac_loss_weight would have no effect"),
    ):
        with pytest.raises(ValueError, match=message):
            FitSignal(**options)
    with pytest.raises(ValueError, match="takes images"):
        FitSignal(deq=EXACT, warm=False, supervise="gradient", data="audio")
    with pytest.raises(ValueError, match="eikonal loss differentiates the field twice"):
        FitShape(deq=RECIPE)
    assert FitShape(deq=RECIPE, eikonal=0.0).batch == 1024
