"""Options of the equilibrium: those that have an effect on a field, and all others refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deq_zoo.cli import main
from deq_zoo.inr import FieldConfig, FitSignal, GeneraliseImage
from deq_zoo.inr.duel import Duel
from deq_zoo.inr.model import KINDS
from deq_zoo.inr.recipes import CORRECTED, EXACT, RECIPE, SHORT
from deq_zoo.inr.shape_task import FitShape
from deq_zoo.preset import find_preset
from torchdeq import DEQConfig

EXPLICIT = [kind for kind in KINDS if kind != "deq"]


def make_net(kind: Any) -> FieldConfig:
    return FieldConfig(kind=kind, filter="fourier" if kind == "mfn" else "siren_like", width=4)


@pytest.mark.parametrize("kind", EXPLICIT)
@pytest.mark.parametrize("task", [FitSignal, GeneraliseImage, FitShape])
def test_an_explicit_field_refuses_options_of_a_solve(task: Any, kind: str) -> None:
    for options in ({"f_max_iter": 30}, {"grad": [5]}, {"f_solver": "anderson"}, {"n_states": 2}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} would have no effect"):
            task(net=make_net(kind), deq=DEQConfig(**options))
    assert task(net=make_net(kind), deq=DEQConfig()).deq.given == frozenset()


@pytest.mark.parametrize("recipe", [RECIPE, SHORT, CORRECTED, EXACT])
@pytest.mark.parametrize("kind", EXPLICIT)
def test_an_explicit_field_takes_the_place_of_an_equilibrium(kind: str, recipe: DEQConfig) -> None:
    task = FitSignal(net=make_net("deq"), deq=recipe)
    assert task.deq == recipe
    assert replace(task, net=make_net(kind)).deq.given == frozenset()
    with pytest.raises(ValueError, match=r"^f_max_iter would have no effect"):
        FitSignal(net=make_net(kind), deq=recipe.with_options(f_max_iter=31))


def test_the_norm_of_a_field_that_has_one_is_used() -> None:
    deq = DEQConfig(norm_type="none")
    assert FitSignal(net=make_net("one_pass"), deq=deq).deq.norm_type == "none"
    with pytest.raises(ValueError, match="norm_type would have no effect"):
        FitSignal(net=make_net("siren"), deq=deq)


def test_a_duel_uses_the_options_of_either_field() -> None:
    deq = DEQConfig(f_max_iter=30)
    for net, rival in (("deq", "siren"), ("siren", "deq")):
        assert Duel(net=make_net(net), rival=make_net(rival), deq=deq).deq.f_max_iter == 30
    with pytest.raises(ValueError, match="f_max_iter would have no effect"):
        Duel(net=make_net("siren"), rival=make_net("ffn"), deq=deq)


def test_losses_on_gradients_have_one_state() -> None:
    for make in (
        lambda deq: FitSignal(deq=deq, warm=False, supervise="gradient"),
        lambda deq: FitShape(deq=deq),
    ):
        make(EXACT)
        with pytest.raises(ValueError, match="n_states would have no effect"):
            make(EXACT.with_options(n_states=2))


@pytest.mark.parametrize(
    "change",
    [
        ["--jac_loss_weight", "1"],
        ["--set", "deq.jac_loss_weight=1"],
        ["--set", "net.kind=siren", "--f_max_iter", "30"],
        ["--set", "net.kind=siren", "--set", "deq.f_max_iter=30"],
    ],
)
def test_commands_refuse_options_without_effect(
    change: list[str], tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "run"
    assert main(["train", "inr-smoke", *change, "--cpu", "--out", str(out)]) == 2
    assert "would have no effect" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("name", ["inr-smoke", "inr-camera", "inr-video", "inr-gradient"])
def test_presets_become_those_of_baselines_by_their_kind(name: str) -> None:
    task: Any = find_preset(name).task
    baseline = replace(task, net=replace(task.net, kind="siren"))
    assert baseline.uses == frozenset()
    assert baseline.deq.given == frozenset()


def test_an_explicit_field_trains_and_is_evaluated_by_command(tmp_path: Path, capsys: Any) -> None:
    run, kind = tmp_path / "run", ["--set", "net.kind=siren"]
    command = ["train", "inr-smoke", *kind, "--cpu", "--quiet", "--no-report", "--out", str(run)]
    assert main(command) == 0
    assert main(["evaluate", str(run), "--cpu"]) == 0
    assert '"psnr"' in capsys.readouterr().out
    assert main(["sample", str(run), "--cpu", "--out", str(tmp_path)]) == 0
    task: Any = find_preset("inr-smoke").task
    siren = replace(task, net=replace(task.net, kind="siren"))
    (picture,) = siren.pictures(siren.build().eval())
    assert "test pixels" in picture.caption
