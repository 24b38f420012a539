"""Fitting and rendering: signals at any resolution, as tensors and as files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from deq_zoo.checkpoint import Checkpoint
from deq_zoo.cli import main
from deq_zoo.errors import ZooError
from deq_zoo.inr import (
    DEQField,
    FieldConfig,
    FitSignal,
    Rendering,
    Representation,
    Signal,
    fit,
    render,
    write_signal,
)
from deq_zoo.inr.compression import compress, spread_samples
from deq_zoo.inr.data import ripples
from deq_zoo.inr.readers import read_image, read_signal, read_wav
from deq_zoo.predictions import OutFolder
from deq_zoo.preset import Preset
from deq_zoo.values import to_data
from tests.zoo.inr.measure import measure
from tests.zoo.training import train
from torchdeq import DEQConfig

NET = FieldConfig(width=16, input_scale=8.0)
RECIPE = DEQConfig(f_max_iter=40, f_tol=1e-4, grad=[3], on_failure="ignore")


def test_video_and_audio_are_fitted_and_rendered(tmp_path: Path) -> None:
    pytest.importorskip("av")
    frames = torch.stack([ripples(3, 12).float() * s for s in (0.5, 0.75, 1.0, 0.75)]) / 127.5 - 1
    write_signal(tmp_path / "a.mp4", frames, 8.0)
    write_signal(tmp_path / "a.wav", torch.linspace(0, 30, 500).sin()[:, None], 1000.0)
    options: dict[str, Any] = {"net": replace(NET, input_scale=8.0), "deq": RECIPE}
    video = FitSignal(file=str(tmp_path / "a.mp4"), batch=200, eval_frames=2, **options)
    model, losses, _ = train(video, 20, lr=1e-2)
    assert losses[-1] < losses[0]
    assert measure(video, model, thorough=True)["psnr"] > 8
    assert video.test_set.rows.shape == (2 * 144,)
    assert video.pictures(model)
    for form, size in (("mp4", (8, 24, 24)), ("gif", (8, 24, 24))):
        rendering = Rendering(scale=2, rate=16.0, format=form)
        first, *_ = video.sample(model, rendering, OutFolder(tmp_path))
        assert "8 x 24 x 24" in first.text
        assert (tmp_path / f"video.{form}").exists()
        assert size == render(model, scale=2, rate=16.0).shape[:-1]
    audio = FitSignal(file=str(tmp_path / "a.wav"), **options)
    model = train(audio, 20, lr=1e-2).model
    assert audio.pictures(model)
    first, *_ = audio.sample(model, Rendering(scale=2), OutFolder(tmp_path / "out"))
    assert "1000 samples" in first.text
    assert read_wav(tmp_path / "out" / "audio.wav").rate == 2000


def test_fit_and_render_in_two_calls() -> None:
    seen: list[int] = []
    model = fit(ripples(1), 40, net=NET, lr=1e-2, progress=lambda step, loss: seen.append(step))
    assert seen == list(range(1, 41))
    assert not model.training
    whole = render(model)
    assert whole.shape == (16, 16, 1)
    middle = render(model, region=(0.0, 0.0, 0.5, 1.0), size=(8, 16))
    assert middle.shape == (8, 16, 1)
    assert_close(render(model, scale=3)[::47, ::47], whole[::15, ::15], rtol=0, atol=1e-3)
    again = fit(ripples(1), 40, net=NET, lr=1e-2)
    assert torch.equal(render(again), whole)
    assert isinstance(fit(ripples(1), 10_000, net=NET, seconds=1e-9), Representation)
    with pytest.raises(ZooError, match=r"a sound \(n, 1\)"):
        fit(torch.zeros(3))


def save_model(task: FitSignal, path: Path) -> None:
    config = {"name": "inr-file", "preset": to_data(Preset(task, steps=1))}
    model = task.build()
    Checkpoint(1, model.state_dict(), config=config, facts=task.facts()).save(path)


def test_a_model_is_rendered_without_its_data(tmp_path: Path) -> None:
    write_signal(tmp_path / "a.png", ripples(3).float() / 127.5 - 1)
    file, model = str(tmp_path / "a.png"), tmp_path / "model.safetensors"
    save_model(FitSignal(net=NET, deq=RECIPE, file=file), model)
    (tmp_path / "a.png").unlink()
    command = ["sample", str(model), "--cpu", "--scale", "2", "--out", str(tmp_path / "s")]
    assert main(command) == 0
    assert read_image(tmp_path / "s" / "image.png").shape == (32, 32, 3)
    before = (tmp_path / "s" / "image.png").read_bytes()
    assert main(command) == 2, "a file that is there must not be replaced"
    assert (tmp_path / "s" / "image.png").read_bytes() == before
    train = ["train", "inr-file", "--cpu", "--out", str(tmp_path / "r")]
    assert main([*train, "--set", f"file={file}"]) == 2
    assert not (tmp_path / "r").exists()


def test_renderings_that_cannot_be_say_why() -> None:
    model = fit(ripples(1), 1, net=NET)
    for options, message in (
        ({"size": (4,)}, "takes 2 positive numbers"),
        ({"scale": 0.0}, "must be positive"),
        ({"region": (0.0, 1.0)}, "2 starts and 2 ends"),
        ({"region": (0.5, 0.0, 0.5, 1.0)}, "2 starts and 2 ends"),
    ):
        with pytest.raises(ZooError, match=message):
            render(model, **options)
    with pytest.raises(ZooError, match=r"written as \.png, not as \.mp4"):
        list(FitSignal(data="ripples").sample(model, Rendering(format="mp4"), OutFolder(Path("x"))))
    with pytest.raises(ZooError, match="give --size"):
        render(Representation(model.field))


def test_fewer_bits_cost_little_and_leave_the_model_alone() -> None:
    model = fit(ripples(1), 60, net=NET, lr=1e-2)
    before = render(model)
    n = sum(p.numel() for p in model.parameters())
    assert isinstance(model.field, DEQField)
    x_map = model.field.injection.x_map
    frequencies = sum(p.numel() for p in x_map.parameters())
    for precision, bits, atol in (
        ("float32", 32 * n, 0.0),
        ("float16", 16 * (n + frequencies), 0.05),
        ("int8", 16 * (n + frequencies) - 8 * 256 + 16 * 16, 0.3),
    ):
        copy, spent = compress(model, precision)
        assert spent == bits
        assert torch.equal(copy.get_parameter("field.injection.x_map.weight"), x_map.weight)
        assert_close(render(copy), before, rtol=0, atol=atol)
    assert torch.equal(render(model), before)
    with pytest.raises(ValueError, match="precision is one of"):
        compress(model, "int4")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": torch.inf}, "positive and finite"),
        ({"scale": 1e7}, "more than the"),
        ({"scale": 1e300}, "more than the"),
        ({"size": (1 << 20, 1 << 20)}, "more than the"),
        ({"rate": -1.0}, "positive and finite"),
        ({"rate": 5.0}, "an image has no rate"),
        ({"scale": 2.0, "size": (4, 4)}, "drop one of them"),
    ],
)
def test_renderings_without_sense_are_refused(options: dict[str, Any], message: str) -> None:
    model = fit(ripples(1), 0, net=NET)
    with pytest.raises(ZooError, match=message):
        render(model, **options)


def test_a_rendering_is_given_once_and_its_format_in_any_case(tmp_path: Path) -> None:
    model = fit(ripples(1), 0, net=NET)
    with pytest.raises(TypeError, match="not both: got scale too"):
        render(model, Rendering(), scale=4)
    task = FitSignal(data="ripples", channels=1)
    assert list(task.sample(model, Rendering(format="PNG"), OutFolder(tmp_path)))
    assert (tmp_path / "image.png").exists()
    video = fit(torch.zeros(2, 4, 4, 3), 0, net=NET)
    with pytest.raises(ZooError, match="a video is written as"):
        list(task.sample(video, Rendering(format="png"), OutFolder(tmp_path)))


def test_a_sound_without_a_rate_is_rendered_but_not_at_another(tmp_path: Path) -> None:
    model = fit(torch.rand(20, 1), 0, net=NET)
    assert render(model, scale=2).shape == (40, 1)
    with pytest.raises(ZooError, match="the sound has no rate: give one"):
        render(model, rate=100.0)
    with pytest.raises(ZooError, match="the sound has no rate: give one"):
        list(FitSignal().sample(model, Rendering(), OutFolder(tmp_path)))
    assert list(FitSignal().sample(model, Rendering(size=(9,), rate=50.0), OutFolder(tmp_path)))
    assert read_signal(tmp_path / "audio.wav").rate == 50
    field = fit(Signal("audio", torch.rand(20, 1), 100.0), 0, net=NET)
    with pytest.raises(ZooError, match="of a sound: drop one"):
        render(field, scale=2, rate=50.0)
    for options in (Rendering(rate=0.3), Rendering(size=(9,), rate=1e10)):
        with pytest.raises(ZooError, match="cannot have the rate"):
            list(FitSignal().sample(field, options, OutFolder(tmp_path / "new")))


def test_compression_is_measured_at_evenly_spread_samples() -> None:
    assert spread_samples((3, 5)).tolist() == list(range(15))
    few = spread_samples((100_000, 10))
    assert len(few) == 65_536
    assert set(few.diff().tolist()) == {15, 16}
    frames = spread_samples((10, 4, 4), most=40)
    assert frames.view(2, 16)[:, 0].tolist() == [0, 80]
    assert frames[16:].tolist() == list(range(80, 96))
    assert len(spread_samples((10, 4, 4), most=1)) == 16


def test_a_rendering_says_where_it_was_measured_and_computes_nothing_twice(tmp_path: Path) -> None:
    signal = Signal("image", ripples(1, 300))
    model = fit(signal, 0, net=NET)
    points: list[int] = []
    task = FitSignal(net=NET).with_signal(signal)
    model.field.register_forward_pre_hook(lambda module, args: points.append(len(args[0])))
    results = list(task.sample(model, Rendering(), OutFolder(tmp_path)))
    assert sum(points) == 90_000 + 2 * 65_536  # the copies have the hook too
    assert results[0].files == (tmp_path / "image.png",)
    assert [each.source for each in results[1:]] == ["float32", "float16", "int8"]
    assert all("dB at 65,536 pixels" in each.text for each in results[1:])
    assert [each.data["reference"] for each in results[1:]] == ["signal"] * 3
