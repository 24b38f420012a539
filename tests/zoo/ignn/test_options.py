"""Options without effect are errors, however they are set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import deq_zoo.ignn.presets  # noqa: F401
from deq_zoo.errors import ZooError
from deq_zoo.preset import PRESETS, find_preset
from deq_zoo.settings import with_settings
from tests.zoo.ignn.tasks import make_task
from torchdeq import DEQConfig

NAMES = sorted(name for name in PRESETS if name.startswith("ignn"))


@pytest.mark.parametrize("name", NAMES)
def test_options_without_effect_are_refused_however_they_are_set(name: str) -> None:
    preset = find_preset(name)
    task: Any = preset.task
    for option, value in (("jac_loss_weight", 0.5), ("n_states", 2), ("core", "indexing")):
        message = f"{option} would have no effect: {type(task).__name__} makes no use of it"
        with pytest.raises(ZooError, match=message):
            preset.with_deq(**{option: value})
        with pytest.raises(ZooError, match=message):
            with_settings(preset, [f"task.deq.{option}={value}"])
        with pytest.raises(ValueError, match=message):
            replace(task, deq=task.deq.with_options(**{option: value}))


@pytest.mark.parametrize(
    ("norm", "used"),
    [
        ({"norm_type": "none"}, set()),
        ({"norm_type": "weight_norm"}, {"norm_no_scale", "norm_clip"}),
        (
            {"norm_type": "weight_norm", "norm_no_scale": True, "norm_clip": True},
            {"norm_no_scale", "norm_clip", "norm_clip_value", "norm_target_norm"},
        ),
        (
            {"norm_type": "spectral_norm"},
            {"norm_no_scale", "norm_clip", "norm_target_norm", "sn_n_power_iters"},
        ),
    ],
)
def test_options_of_a_norm_count_only_with_it(norm: dict[str, Any], used: set[str]) -> None:
    changes = {
        "norm_no_scale": True, "norm_clip": True, "norm_clip_value": 0.5, "norm_target_norm": 0.3,
        "sn_n_power_iters": 3,
    }  # fmt: skip
    task = make_task(deq=DEQConfig(norm))
    assert {name for name in task.uses if "norm" in name or name.startswith("sn_")} - used == {
        "norm_type", "f_stop_norm"
    }  # fmt: skip
    for name, value in changes.items():
        if name in used:
            make_task(deq=DEQConfig({**norm, name: value})).build()
        else:
            with pytest.raises(ValueError, match=f"{name} would have no effect"):
                make_task(deq=DEQConfig({**norm, name: value}))


def test_a_preset_can_do_without_its_norm() -> None:
    task = find_preset("ignn-smoke").with_deq(norm_type="none").task
    assert "ig1.W" in task.build().state_dict()
    with pytest.raises(ZooError, match="norm_clip would have no effect"):
        find_preset("ignn-smoke").with_deq(norm_type="none", norm_clip=True)
