"""`deq-zoo train` accepts the flags that the doctor recommends, whatever the preset's gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from deq_zoo.cli import main
from deq_zoo.preset import find_preset
from tests import problems
from torchdeq import doctor
from torchdeq.diagnostics import Diagnosis

#: Presets with an implicit gradient, with a damped phantom gradient, and with a plain one.
PRESETS = ("mdeq-quick", "mdeq-cifar10-tiny", "flow-quick", "ignn-quick", "lm-wt2-seq")


def accepts(name: str, flags: tuple[str, ...]) -> bool:
    return main(["info", name, *" ".join(flags).split()]) == 0


def diagnose(name: str, f: Any, z0: Tensor) -> Diagnosis:
    task: Any = find_preset(name).task
    config = task.deq.with_options(n_states=1, indexing=[])
    return doctor(f, z0, config=config, seconds=60.0, budget=100)


@pytest.mark.parametrize("name", PRESETS)
def test_the_flags_of_every_gradient_are_accepted(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    f, z0, _ = problems.affine(problems.contraction(0.5))
    found = diagnose(name, f, z0)
    assert {trial.name.split(",")[0] for trial in found.backwards} == {"phantom", "ift"}
    for trial in found.backwards:
        assert accepts(name, trial.flags), (trial.name, trial.flags, capsys.readouterr().err)
    assert accepts(name, found.recommendation.flags), capsys.readouterr().err


@pytest.mark.parametrize("name", PRESETS)
def test_the_flags_for_a_map_without_a_fixed_point_are_accepted(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = diagnose(name, lambda z: z + 1, torch.zeros(2, 3))
    assert "--grad 12" in found.recommendation.flags
    assert accepts(name, found.recommendation.flags), capsys.readouterr().err


def test_a_gradient_that_is_not_implicit_drops_the_options_of_the_backward_solve() -> None:
    for change in ("--no-ift", "--set ift=false"):
        assert main(["info", "lm-wt2-seq", *change.split(), "--grad", "5"]) == 0
        assert main(["info", "lm-wt2-seq", *change.split(), "--b_tol", "1e-3"]) == 2
