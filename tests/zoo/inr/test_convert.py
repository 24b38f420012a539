"""The authors' weights: there and back, from state_dicts and from summary files."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from deq_zoo.checkpoint import Checkpoint
from deq_zoo.cli import main
from deq_zoo.errors import CheckpointError
from deq_zoo.inr import FieldConfig, FitSignal, GeneraliseImage
from deq_zoo.inr.convert import from_authors
from deq_zoo.preset import find_preset
from deq_zoo.task import Task
from torchdeq import DEQConfig

NET = FieldConfig(width=16, input_scale=8.0)
RECIPE = DEQConfig(f_max_iter=40, f_tol=1e-4, grad=[3], on_failure="ignore")


@pytest.mark.parametrize("filter", ["siren_like", "fourier", "gabor"])
@pytest.mark.parametrize("kind", ["deq", "one_pass"])
def test_the_authors_weights_go_there_and_back(kind: Any, filter: Any) -> None:
    deq = RECIPE if kind == "deq" else DEQConfig()
    net = replace(NET, kind=kind, filter=filter, layers=2)
    task = FitSignal(net=net, deq=deq, data="ripples")
    ours = task.build().state_dict()
    theirs = task.to_authors(ours)
    assert theirs["f.z_init"].shape == (1, 16)
    assert bool((theirs["f.z_init"] == (0 if filter == "siren_like" else 1)).all())
    back, facts = task.from_authors(theirs)
    assert back.keys() == ours.keys()
    assert all(torch.equal(value, back[key]) for key, value in ours.items())
    assert task.build(facts).shape == (16, 16)


def test_a_baseline_goes_there_and_back() -> None:
    net = replace(NET, kind="siren", layers=2)
    task = GeneraliseImage(net=net, deq=DEQConfig(), data="ripples")
    ours = task.build().state_dict()
    back = task.from_authors(task.to_authors(ours)).weights
    assert all(torch.equal(value, back[key]) for key, value in ours.items())
    assert back.keys() == ours.keys()


def test_names_of_newer_weight_norms_are_read() -> None:
    task = FitSignal(net=NET, deq=RECIPE, data="ripples")
    model = task.build()
    newer = {
        key.replace(".weight_g", ".parametrizations.weight.original0").replace(
            ".weight_v", ".parametrizations.weight.original1"
        ): value
        for key, value in task.to_authors(model.state_dict()).items()
    }
    assert from_authors(model.field, newer).keys() == model.field.state_dict().keys()


def test_weights_of_another_field_are_refused() -> None:
    task = FitSignal(net=NET, deq=RECIPE, data="ripples")
    theirs = task.to_authors(task.build().state_dict())
    with pytest.raises(CheckpointError, match="does not belong to the filter"):
        task.from_authors(theirs | {"f.z_init": 1 - theirs["f.z_init"]})
    del theirs["output_map.bias"]
    theirs["output_map.weight"] = torch.zeros(1, 16)
    with pytest.raises(CheckpointError, match=r"lacks output_map\.bias; output_map\.weight is"):
        task.from_authors(theirs)


def test_released_files_convert_by_command(tmp_path: Path) -> None:
    task = find_preset("inr-celeba").task
    save_file(task.to_authors(task.build().state_dict()), tmp_path / "released.safetensors")
    command = ["convert", str(tmp_path / "released.safetensors"), "--preset", "inr-celeba"]
    assert main([*command, "--out", str(tmp_path / "converted.safetensors")]) == 0
    assert main(["sample", str(tmp_path / "converted.safetensors"), "--cpu", "--size", "8,8",
                 "--out", str(tmp_path)]) == 0  # fmt: skip
    assert (tmp_path / "image.png").exists()


def make_summary(tasks: dict[str, FitSignal], images: int) -> dict[str, Any]:
    """Return what the authors' program for images saves: all models, each with all images."""
    return {
        name: {
            "config": {
                "args": argparse.Namespace(lr=1e-3),
                "filter_type": task.net.filter,
                "interm_channels": task.net.width,
                "n_layers": task.net.layers,
                "one_pass": task.net.kind == "one_pass",
            },
            "results": {"test_psnr": [[np.float64(20.0)]]},
            "state_dicts": [task.to_authors(task.build().state_dict()) for _ in range(images)],
            "misc": {"imgs": [np.zeros((1, 16, 16, 3), dtype=np.float32)]},
            "finished": True,
        }
        for name, task in tasks.items()
    }


def test_a_summary_file_gives_the_weights_of_one_model_and_image() -> None:
    deq = FitSignal(net=NET, deq=RECIPE, data="ripples")
    explicit = replace(deq, net=replace(NET, kind="one_pass"), deq=DEQConfig())
    wide = replace(deq, net=replace(NET, width=8))
    tasks = {"DEQ-Siren_like-MFN1L16D": deq, "Siren_like-MFN1L16D": explicit, "wide": wide}
    summary = make_summary(tasks, images=2)
    for name, task in tasks.items():
        for index in range(2):
            picked = replace(task, index=index).pick_state(summary)
            assert picked is summary[name]["state_dicts"][index]
    with pytest.raises(CheckpointError, match="has 2 images of this model, numbered from 0"):
        replace(deq, index=2).pick_state(summary)
    other = replace(deq, net=replace(NET, filter="gabor"))
    with pytest.raises(CheckpointError, match=r"the models DEQ-Siren_like.*none of filter gabor"):
        other.pick_state(summary)


@pytest.mark.skipif(not hasattr(Task, "pick_state"), reason="files have one state_dict only")
def test_a_summary_file_converts_by_command(tmp_path: Path) -> None:
    task: Any = find_preset("inr-smoke").task
    torch.save(make_summary({"DEQ-Siren_like-MFN1L16D": task}, images=2), tmp_path / "summary.pth")
    out = tmp_path / "converted.safetensors"
    command = ["convert", str(tmp_path / "summary.pth"), "--preset", "inr-smoke"]
    assert main([*command, "--set", "index=1", "--out", str(out)]) == 0
    summary = torch.load(tmp_path / "summary.pth", weights_only=False)
    wanted = task.from_authors(replace(task, index=1).pick_state(summary)).weights
    weights = Checkpoint.load(out).model
    assert all(torch.equal(weights[key], value) for key, value in wanted.items())


def test_other_files_are_no_summaries() -> None:
    task = FitSignal(net=NET, deq=RECIPE, data="ripples")
    state = task.to_authors(task.build().state_dict())
    for content in (state, {}, [state], {"state_dict": state}, None):
        assert task.pick_state(content) is None
