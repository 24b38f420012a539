"""Two fields side by side: each trained as alone, each scored at its own best."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from deq_zoo.cli import main
from deq_zoo.errors import ZooError
from deq_zoo.inr import FieldConfig, GeneraliseImage, Rendering
from deq_zoo.inr.duel import Duel
from deq_zoo.inr.pair import Course, Pair
from deq_zoo.predictions import OutFolder
from deq_zoo.preset import find_preset
from tests.zoo.inr.measure import measure
from tests.zoo.inr.resuming import assert_resumes_bit_for_bit
from tests.zoo.training import train
from torchdeq import DEQConfig

NET = FieldConfig(width=16, input_scale=8.0)
RIVAL = replace(NET, kind="siren", layers=2)
RECIPE = DEQConfig(f_max_iter=40, f_tol=1e-4, grad=[3], on_failure="ignore")
TASK = Duel(net=NET, rival=RIVAL, deq=RECIPE, data="ripples", look_every=1)
SMALL = [
    f"--set={setting}"
    for setting in (
        *("data=ripples", "shrink=1", "net.width=16", "rival.width=16", "net.input_scale=8"),
        *("rival.input_scale=8", "steps=20", "look_every=3", "eval_every=9", "save_every=100"),
    )
]


def build_pair(task: Duel = TASK) -> Pair:
    torch.manual_seed(0)
    return task.build()


def test_a_duel_trains_both_as_they_would_alone() -> None:
    pair = train(TASK, 5, lr=5e-3).model
    alone = GeneraliseImage(net=NET, deq=RECIPE, data="ripples")
    model = train(alone, 5, lr=5e-3).model
    for a, b in zip(pair.field.parameters(), model.parameters(), strict=True):
        assert_close(a, b)


def test_each_field_is_scored_at_its_own_best() -> None:
    """Train with a rate so high that the rival gets worse again while the equilibrium improves."""
    pair = train(TASK, 40, lr=0.2).model
    steps, psnr = pair.course.entries()
    assert len(steps) == 40
    best = psnr.max(0)
    assert psnr[best.indices[0], 1] < best.values[1] - 0.3, "the best steps should differ"
    metrics = measure(TASK, pair, "val")
    assert metrics["psnr"] == pytest.approx(best.values[0].item(), abs=1e-4)
    assert metrics["rival_psnr"] == pytest.approx(best.values[1].item(), abs=1e-4)
    assert metrics["mean_psnr"] == pytest.approx(best.values.mean().item(), abs=1e-4)
    assert pair.best_step.tolist() == (best.indices + 1).tolist()
    assert measure(TASK, pair, "test").keys() == metrics.keys()


def test_copies_are_replaced_by_better_weights_alone() -> None:
    pair = build_pair()
    for step, (psnr, shift) in enumerate([((10.0, 20.0), 1.0), ((11.0, 15.0), 2.0)], start=1):
        with torch.no_grad():
            for field in (pair.field, pair.rival):
                next(field.parameters()).fill_(shift)
        pair.step.fill_(step)
        pair.look(torch.tensor(psnr), every=1)
    ours, rival = pair.eval().chosen
    assert float(next(ours.parameters()).mean()) == 2.0
    assert float(next(rival.parameters()).mean()) == 1.0
    assert not any(p.requires_grad for each in (ours, rival) for p in each.parameters())
    x = 2 * torch.rand(5, 2) - 1
    assert torch.equal(pair(x, rival=True).prediction, rival(x).prediction)
    assert torch.equal(pair.predict(x).prediction, ours(x).prediction)


def test_a_duel_before_its_first_look_scores_the_fields_as_they_are() -> None:
    task = replace(TASK, look_every=100)
    pair = train(task, 3, lr=5e-3).model
    alone = GeneraliseImage(net=NET, deq=RECIPE, data="ripples")
    assert measure(task, pair)["psnr"] == pytest.approx(measure(alone, pair.field)["psnr"])
    assert [picture.name for picture in task.pictures(pair)] == ["fit"]


def test_a_course_thins_itself() -> None:
    course = Course()
    for look in range(3000):
        course.record(look, 5 * look, torch.tensor([float(look), 0.0]))
    steps, psnr = course.entries()
    assert len(steps) <= 128
    assert {b - a for a, b in pairwise(steps.tolist())} == {5 * 32}
    assert torch.equal(5 * psnr[:, 0], steps.float())
    assert steps[-1] >= 5 * 2900


def test_a_duel_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Compare every tensor: clock times in the weights once made two runs differ."""
    assert_resumes_bit_for_bit("inr-quick", SMALL, tmp_path)


def test_a_duel_draws_and_renders_the_best_weights(tmp_path: Path) -> None:
    pair = train(TASK, 4, lr=5e-3).model
    fit, race = TASK.pictures(pair)
    assert "diagonally between" in fit.caption
    assert "own best weights, those of the steps" in fit.caption
    assert "all validation pixels" in race.caption
    first, *_ = TASK.sample(pair, Rendering(), OutFolder(tmp_path))
    assert first.files == (tmp_path / "image.png",)
    assert_close(pair.predict().prediction, pair.best_representation().predict().prediction)


class Wrapped(nn.Module):
    """A model as data-parallel training wraps it: its attributes are out of reach."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, *args: Any, **call: Any) -> Any:
        return self.module(*args, **call)


def test_a_duel_can_be_wrapped_for_several_processes() -> None:
    pair, other = build_pair(), build_pair()
    batch = TASK.train_batch(0, 0)
    TASK.loss(pair, batch, None).value.backward()
    TASK.loss(Wrapped(other), batch, None).value.backward()
    for a, b in zip(pair.parameters(), other.parameters(), strict=True):
        assert (a.grad is None) == (not a.requires_grad)
        assert a.grad is None or torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


def test_a_duel_converts_nothing() -> None:
    for convert in (TASK.from_authors, TASK.to_authors):
        with pytest.raises(ZooError, match="--preset inr-nature"):
            convert({})


@pytest.mark.parametrize("net", ["net.kind=siren", "net.kind=one_pass"])
def test_a_duel_of_explicit_fields_trains_and_reports(net: str, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path), "--cpu", "--quiet", "--no-report"]
    assert main(["train", "inr-quick", *SMALL, "--set", net, *out]) == 0
    assert main(["evaluate", str(tmp_path), "--cpu"]) == 0


def test_the_quick_preset_looks_at_every_step_that_is_evaluated() -> None:
    preset = find_preset("inr-quick")
    assert isinstance(preset.task, Duel)
    assert preset.eval_every % preset.task.look_every == 0
    assert preset.steps % preset.task.look_every == 0
