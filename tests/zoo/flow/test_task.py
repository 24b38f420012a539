"""Presets, training, splits and conversion, from the command line where users are."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import deq_zoo
from deq_zoo.cli import main
from deq_zoo.errors import CheckpointError
from deq_zoo.family import find_family
from deq_zoo.flow import DEQFlow
from deq_zoo.flow.convert import from_authors, to_authors
from deq_zoo.flow.formats import read_flo
from deq_zoo.flow.model import State
from deq_zoo.flow.presets import DENSE, SPARSE
from deq_zoo.flow.task import StageTask, WarpTask
from deq_zoo.images.files import read_image
from deq_zoo.preset import PRESETS, find_preset, load_presets
from tests.zoo.flow.inputs import write_frames
from torchdeq import DEQConfig

load_presets(find_family("flow"))
NAMES = [name for name in PRESETS if name.startswith("flow-")]


@pytest.mark.parametrize("name", NAMES)
def test_presets_build(name: str) -> None:
    preset = find_preset(name)
    with torch.device("meta"):
        preset.task.build()


def test_the_papers_presets() -> None:
    chairs, things = find_preset("flow-chairs-b"), find_preset("flow-things-h")
    assert isinstance(chairs.task, StageTask)
    assert isinstance(things.task, StageTask)
    assert (chairs.steps, chairs.clip, chairs.optim.lr, chairs.seed) == (120_000, 1.0, 4e-4, 1234)
    assert (chairs.task.batch, chairs.task.crop) == (12, (368, 496))
    assert (things.task.batch, things.task.crop, things.optim.lr) == (6, (400, 720), 1.25e-4)
    assert things.task.net.all_grad
    assert things.task.net.freeze_bn
    assert not chairs.task.net.freeze_bn
    assert (DENSE.f_max_iter, DENSE.n_states, DENSE.grad) == (36, 6, [1])
    assert (SPARSE.f_max_iter, SPARSE.n_states, SPARSE.grad) == (40, 2, [3])
    assert things.target is not None
    assert things.target.value == 1.28


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("flow") / "run"
    assert main(["train", "flow-smoke", "--cpu", "--quiet", "--out", str(out)]) == 0
    return out


def test_the_smoke_preset_trains_and_reports(smoke: Path) -> None:
    assert "flows" in (smoke / "report.html").read_text()
    with Image.open(smoke / "pictures" / "flows.png") as picture:
        assert picture.width > 400


def test_predicts_flow_of_two_pictures(
    smoke: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    files = [str(file) for file in write_frames(tmp_path, 2)]
    assert main(["predict", str(smoke), *files, "--out", str(out), "--cpu"]) == 0
    assert "4 evaluations" in capsys.readouterr().out
    assert read_flo(out / "frame0.flo").shape == (2, 66, 70)
    assert read_image(out / "frame0_flow.png").shape == (3, 66, 70)
    assert sorted(p.name for p in out.iterdir()) == [
        "frame0.flo",
        "frame0_flow.png",
        "predictions.jsonl",
    ]


def test_a_later_stage_starts_from_an_earlier_run(smoke: Path) -> None:
    task = find_preset("flow-smoke").task
    later: Any = replace(task, start_from=str(smoke))  # type: ignore[type-var]
    model, earlier = later.build(), deq_zoo.load(smoke)
    later.begin(model)
    for key, value in earlier.state_dict().items():
        assert torch.equal(model.state_dict()[key], value)


def test_a_run_needs_the_one_it_started_from_no_more(
    smoke: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, then = tmp_path / "first", tmp_path / "then"
    shutil.copytree(smoke, first)
    args = ["train", "flow-smoke", "--cpu", "--quiet", "--no-report", "--out", str(then)]
    assert main([*args, "--set", f"start_from={first}", "--max-seconds", "1e-9"]) == 0
    shutil.rmtree(first)
    assert main([*args, "--resume"]) == 0
    deq_zoo.load(then)
    assert main([*args, "--force", "--set", f"start_from={first}"]) == 2
    assert "no run folder or checkpoint" in capsys.readouterr().err
    assert (then / "last.safetensors").exists()  # the error comes before the folder is replaced


def test_settings_that_would_do_nothing_are_refused(tmp_path: Path) -> None:
    assert main(["info", "flow-smoke", "--data-dir", str(tmp_path)]) == 2
    with pytest.raises(ValueError, match="eval_pairs must be at least 1"):
        WarpTask(eval_pairs=0)
    with pytest.raises(ValueError, match=r"noise must lie in \[0, 255\]"):
        WarpTask(noise=-1.0)
    with pytest.raises(ValueError, match="jac_loss_weight would have no effect"):
        WarpTask(deq=DEQConfig(jac_loss_weight=1.0))


def test_released_weights_go_round(smoke: Path, tmp_path: Path) -> None:
    model = deq_zoo.load(smoke)
    written = to_authors(model.state_dict())
    assert "module.cnet.layer2.0.downsample.1.weight" in written
    torch.save(written, tmp_path / "net.pth")
    assert main(["convert", str(tmp_path / "net.pth"), "--preset", "flow-smoke"]) == 0
    again = deq_zoo.load(tmp_path / "net.safetensors")
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value)
    bare = to_authors(model.state_dict(), data_parallel=False)
    only_twin = {k: v for k, v in bare.items() if ".norm3." not in k}
    assert from_authors(only_twin).keys() == model.state_dict().keys()
    halves = {k: v.half() if v.is_floating_point() else v for k, v in only_twin.items()}
    assert not any(v.dtype == torch.float16 for v in from_authors(halves).values())
    bare["cnet.layer2.0.downsample.1.weight"] += 1
    with pytest.raises(CheckpointError, match="one tensor in the authors' files"):
        from_authors(bare)


def test_a_solve_may_start_from_a_flow_alone() -> None:
    model = find_preset("flow-smoke").task.build().eval()
    a, b = torch.randint(256, (2, 1, 3, 64, 64), dtype=torch.uint8)
    assert isinstance(model, DEQFlow)
    flow = torch.randn(1, 2, 8, 8)
    result = model((a, b), flow, f_max_iter=2)
    wanted = model((a, b), State(torch.zeros(1, 32, 8, 8), flow), f_max_iter=2)
    assert torch.equal(result.prediction, wanted.prediction)
    with pytest.raises(ValueError, match="z0 for these images"):
        model((a, b), torch.randn(1, 2, 4, 8))
