"""Training, resuming, evaluating, exporting and writing with attractors, by the commands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import deq_zoo
from deq_zoo.cli import main
from deq_zoo.doctor import first_solves
from deq_zoo.errors import ZooError
from deq_zoo.lm.attractor.model import Attractor
from deq_zoo.lm.exporting import make_export
from deq_zoo.lm.passages import score_passages
from deq_zoo.lm.presets import ATTRACTOR, IMPLICIT, lm_smoke, lm_smoke_attractor
from deq_zoo.lm.task import LanguageTask
from deq_zoo.loading import open_model
from deq_zoo.uses import UnusedOptions
from tests.zoo.lm.attractor.nets import draw_ids, make_model
from tests.zoo.training import train
from torchdeq import Anderson, DEQConfig, export

NAME = "lm-smoke-attractor"


def make_task(**changes: Any) -> LanguageTask:
    task = lm_smoke_attractor().task
    assert isinstance(task, LanguageTask)
    return replace(task, **changes)


def test_an_attractor_trains_evaluates_predicts_and_writes(tmp_path: Path, capsys: Any) -> None:
    whole = str(tmp_path / "whole")
    deq_zoo.train(NAME, out=whole, quiet=True, cpu=True, report=False)
    capsys.readouterr()
    assert main(["evaluate", whole, "--cpu"]) == 0
    assert "bits_per_byte" in capsys.readouterr().out
    assert main(["sample", whole, "--cpu", "--prompt", "10 11", "--tokens", "9"]) == 0
    assert capsys.readouterr().out.startswith("10 11")
    model = deq_zoo.load(whole)
    assert isinstance(model, Attractor)
    score = model.predict("100 101 102 103")
    assert score.prediction.perplexity > 1
    again = model.predict("100 101 102 103", z0=score.state)
    torch.testing.assert_close(
        again.prediction.log_probs, score.prediction.log_probs, atol=1e-2, rtol=0
    )


def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options: dict[str, Any] = {"quiet": True, "cpu": True, "report": False, "save_every": 1}
    deq_zoo.train(NAME, out=whole, **options)
    deq_zoo.train(NAME, out=parts, max_seconds=1e-6, **options)
    deq_zoo.train(NAME, out=parts, resume=True, **options)
    a, b = (deq_zoo.load(each, best=False).state_dict() for each in (whole, parts))
    assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize(
    "changes",
    [
        {"memory": 0},
        {"deq": IMPLICIT, "ahead": 0, "ramp": 0, "consistency": 0.0},
        {"deq": ATTRACTOR.with_options(grad=[1]), "consistency": 0.0},
        {"deq": ATTRACTOR.with_options(jac_loss_weight=0.1, jac_loss_freq=0.5)},
    ],
    ids=["unrolled", "implicit", "one step", "regularised"],
)
def test_learning_lowers_the_loss(changes: dict[str, Any]) -> None:
    task = make_task(**changes)
    model = train(task, 30, lr=0.01).model
    with torch.no_grad():
        result = task.evaluate(model, "val", thorough=True)
    assert result.metrics["loss"] < 4.0  # log 256 = 5.5
    assert 0 < max(result.solver.radii) < 2


def test_evaluations_rise_over_the_first_batches_with_a_solve() -> None:
    task = make_task(ahead=3, ramp=40, explicit=10)
    drawn = [task.train_batch(step, 0).ahead for step in range(210)]
    assert drawn[:10] == [None] * 10
    del drawn[:10]
    assert drawn[:10] == [0] * 10
    assert max(each or 0 for each in drawn[:20]) <= 1
    assert {*drawn[40:]} == {0, 1, 2, 3}
    with pytest.raises(ValueError, match="ramp=4 is a rise to ahead, which is 0"):
        make_task(ahead=0, ramp=4).build()


def test_the_first_batches_may_be_those_of_an_explicit_network() -> None:
    task = make_task(explicit=3, ramp=0)
    model = task.build().double().train()
    assert isinstance(model, Attractor)
    batches = [task.train_batch(step, 0) for step in range(5)]
    assert [batch.explicit for batch in batches] == [True, True, True, False, False]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)  # the gated block does something
    memory = None
    for ids, target, *_ in batches[:2]:  # the second has a memory
        loss = task.loss(model, batches[0 if memory is None else 1], memory)
        gradient = torch.autograd.grad(loss.value, [*model.parameters()])
        x = model.embed(ids)
        around = model.surroundings(x, memory)
        kept = list[torch.Tensor]()
        *backbone, core = model.blocks
        for block, each in zip(backbone, around, strict=False):
            kept += block.keys(x)
            x = block(x, *each)[0]
        z = core(2 * x, *around[-1])[0] - x  # c + R(2c)
        kept += core.keys(z + x)  # those that the next solve would look for
        expected = model.nll(z, target).mean()
        torch.testing.assert_close(loss.value, expected, atol=1e-12, rtol=0)
        for own, other in zip(
            gradient, torch.autograd.grad(expected, [*model.parameters()]), strict=True
        ):
            torch.testing.assert_close(own, other, atol=1e-12, rtol=0)
        memory = loss.carry
        by_head = torch.stack(kept).permute(1, 3, 0, 2, 4).flatten(2)
        torch.testing.assert_close(memory.z[:, -len(ids[0]) :], by_head, atol=1e-12, rtol=0)


def test_explicit_batches_have_the_options_that_they_use() -> None:
    regularised = ATTRACTOR.with_options(jac_loss_weight=0.1, jac_loss_freq=1.0)
    task = make_task(explicit=3, ahead=0, ramp=0, deq=regularised)
    model = task.build().train()
    explicit, solved = (task.loss(model, task.train_batch(step, 0), None) for step in (0, 3))
    assert task.train_batch(0, 0).jac_weight == 0 < task.train_batch(3, 0).jac_weight
    assert explicit.stats is None
    assert explicit.metrics.keys() < solved.metrics.keys() == {"nll", "last_step"}
    with pytest.raises(TypeError, match=r"no options of a solve, got \{'f_max_iter': 3\}"):
        model(draw_ids(), explicit=True, f_max_iter=3)
    original = lm_smoke().task
    assert isinstance(original, LanguageTask)
    with pytest.raises(ValueError, match="explicit=3 needs the backbone of an attractor"):
        replace(original, explicit=3).build()


@pytest.mark.parametrize("mixing", ["positions", "published"])
def test_an_explicit_batch_needs_no_solver(mixing: Any) -> None:
    model, ids = make_model(DEQConfig(f_max_iter=9, ift=True), mixing=mixing).train(), draw_ids()
    out = model(ids, explicit=True)
    x = model.embed(ids)
    around = model.surroundings(x)
    c, _ = model.run_backbone(x, around)
    torch.testing.assert_close(out.z, model.apply_core(2 * c, around[2:]) - c)


def test_a_run_that_never_solves_is_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"quiet": True, "cpu": True, "report": False}
    with pytest.raises(ZooError, match=r"explicit=2 batches of 2 leave none.*: explicit=1"):
        deq_zoo.train(NAME, out=tmp_path / "a", steps=2, **options)
    assert not (tmp_path / "a").exists()
    deq_zoo.train(NAME, out=tmp_path / "b", steps=2, accumulate=2, **options)


def test_the_doctor_examines_the_batches_that_solve(tmp_path: Path) -> None:
    deq_zoo.train(NAME, out=tmp_path, quiet=True, cpu=True, report=False)
    model, preset = open_model(tmp_path)
    (solve,) = first_solves(model, preset)
    assert solve.name == "deq"


def test_settings_without_effect_on_an_attractor_are_errors() -> None:
    with pytest.raises(UnusedOptions, match="norm_type would have no effect"):
        make_task(deq=ATTRACTOR.with_options(norm_type="spectral_norm"))
    net = replace(make_task().net, mixing="published", min_evaluations=8)
    with pytest.raises(UnusedOptions, match="f_check_every, tau would"):
        make_task(net=net, deq=DEQConfig(f_max_iter=9, tau=0.5, f_check_every=2))
    with pytest.raises(ValueError, match="has one state and no unrolled steps"):
        make_task(net=net).build()
    with pytest.raises(ValueError, match="cannot finish in order"):
        make_model({"f_solver": "auto"})(draw_ids())
    with pytest.raises(ZooError, match="positions of an attractor"):
        score_passages(make_model(), draw_ids(), slots=2)


@torch.no_grad()
def test_passages_are_scored_in_batches() -> None:
    model, ids = make_model(), draw_ids(5, 7)
    log_probs, stats = score_passages(model, ids, batch=2)
    expected = model.log_prob(model(ids[:, :-1]).z).gather(2, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(log_probs, expected.float(), atol=1e-6, rtol=0)
    assert len(stats.status) == 5 * 6


@pytest.mark.slow
def test_an_exported_attractor_gives_the_log_probabilities_of_the_model() -> None:
    model = make_model({"f_solver": "anderson", "f_max_iter": 30, "f_tol": 1e-6}).float()
    exportable = make_export(model, 6)
    ids, targets = exportable.example.values()
    program = export.export(exportable.module, (ids, targets), solver=Anderson())
    more = torch.cat((ids, ids.flip(0), targets)), torch.cat((targets, targets, ids))
    with torch.no_grad():
        expected = exportable.module(*more)["log_probs"]
        result = program.module()(*more)["log_probs"]
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=0)
