"""Mistakes: what is refused, what the message says, and what must not be lost on the way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from deq_zoo.cli import main
from deq_zoo.errors import DataError
from deq_zoo.inr import (
    FieldConfig,
    FitSignal,
    GeneraliseImage,
    Signal,
    coordinates,
    fit,
    make_field,
    write_signal,
)
from deq_zoo.inr.data import open_signal, ripples
from deq_zoo.inr.model import KINDS
from deq_zoo.inr.readers import read_image, read_signal
from deq_zoo.inr.shape_task import FitShape
from deq_zoo.inr.warm import check_memory
from deq_zoo.preset import find_preset
from deq_zoo.task import Shard
from tests.zoo.inr.measure import measure
from torchdeq import DEQConfig

NET = FieldConfig(width=8, input_scale=8.0)
RECIPE = DEQConfig(f_max_iter=20, grad=[3], on_failure="ignore")


def zero_bytes(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (torch.rand(12, 10), ValueError, r"a sound is \(n, 1\), an image \(H, W, 1\)"),
        (torch.rand(12, 2), ValueError, "must have 1 channels"),
        (zero_bytes(2, 4, 4, 1), ValueError, "must have 3 channels"),
        (zero_bytes(4, 4, 4), ValueError, "must have 1 or 3 channels"),
        (255 * torch.rand(4, 4, 3), ValueError, "from 0 to 1"),
        (torch.rand(4, 4, 3) - 1, ValueError, "from 0 to 1"),
        (torch.full((4, 4, 3), torch.nan), ValueError, "must be finite"),
        (torch.full((9, 1), torch.inf), ValueError, "must be finite"),
        (
            zero_bytes(4, 4, 3).int(),
            TypeError,
            r"bytes \(uint8\) or floating point, got torch.int32",
        ),
        (zero_bytes(4, 4, 3).bool(), TypeError, "got torch.bool"),
        (zero_bytes(9, 1), TypeError, "must be floating point"),
    ],
)
def test_tensors_that_are_no_signal_are_refused(
    source: torch.Tensor, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fit(source, 1, net=NET)


def test_fit_applies_every_option_or_refuses_it(tmp_path: Path) -> None:
    write_signal(str(tmp_path / "a.png"), ripples(3).float() / 127.5 - 1)
    grey = fit(tmp_path / "a.png", 1, net=NET, channels=1, side=6, shrink=2)
    assert (grey.shape, grey.field.o) == ((6, 6), 1)
    assert fit(ripples(3), 1, net=NET, channels=1).field.o == 1
    assert fit(torch.rand(30, 1), 1, net=NET, length=20).shape == (20,)
    assert fit(torch.rand(8, 8, 1)[::2, ::2], 1, net=NET).shape == (4, 4)
    for name in ("data", "file", "data_dir", "index"):
        with pytest.raises(TypeError, match=f"drop {name}"):
            fit(ripples(1), 1, net=NET, **dict[str, Any]({name: 0}))
    with pytest.raises(ValueError, match="channels is an option for images"):
        fit(torch.rand(30, 1), 1, net=NET, channels=3)
    with pytest.raises(ValueError, match="length must be at least 0"):
        fit(torch.rand(30, 1), 1, net=NET, length=-2)


def test_strided_values_give_the_targets_of_their_copy() -> None:
    values = torch.rand(6, 6, 3)[::2, 1::2]
    rows = torch.arange(9)
    copy = Signal("image", values.contiguous())
    assert torch.equal(Signal("image", values).targets(rows), copy.targets(rows))


def test_a_field_of_other_channels_than_the_signal_is_refused() -> None:
    task = FitSignal(net=NET, deq=RECIPE, data="ripples")
    model = replace(task, channels=1).build()
    with pytest.raises(ValueError, match=r"the field are \(256, 1\), those of the signal \("):
        task.loss(model, task.train_batch(0, 0), None)


@pytest.mark.parametrize("warm", [True, False])
def test_a_process_without_points_has_a_loss_of_zero(warm: bool) -> None:
    task = FitSignal(net=NET, deq=RECIPE, data="ripples", batch=255, warm=warm)
    batch = task.train_batch(1, 0, Shard(1, 2))
    assert not len(batch)
    model = task.build()
    carry = task.loss(model, task.train_batch(0, 0, Shard(1, 2)), None).carry
    _assert_nothing_learnt(task.loss(model, batch, carry), model)


@pytest.mark.parametrize("eikonal", [0.0, 0.1])
def test_a_process_without_points_of_a_shape_has_a_loss_of_zero(eikonal: float) -> None:
    deq = DEQConfig(ift=True, higher_order=True, on_failure="ignore")
    task = FitShape(net=NET, deq=deq, batch=1, eikonal=eikonal)
    model = task.build()
    _assert_nothing_learnt(task.loss(model, task.train_batch(0, 0, Shard(1, 2)), None), model)


def _assert_nothing_learnt(loss: Any, model: torch.nn.Module) -> None:
    assert loss.value.item() == 0
    loss.value.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients
    assert not any(bool(g.any()) for g in gradients)


def test_files_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    sound, image = torch.zeros(4, 1), torch.zeros(4, 4, 3)
    for name, values, message in (
        ("a.wav", sound, "the sound has no rate: give one"),
        ("a.jpg", image, "known: .png, .wav, .mp4, .gif"),
        ("a.wav", image, "is a sound, 1 axes"),
    ):
        with pytest.raises(ValueError, match=message):
            write_signal(tmp_path / "new" / name, values)
    assert not (tmp_path / "new").exists()
    write_signal(str(tmp_path / "a.PNG"), image)
    assert read_image(tmp_path / "a.PNG").shape == (4, 4, 3)


def test_grey_of_16_bits_keeps_its_shades(tmp_path: Path) -> None:
    wanted = np.arange(256, dtype=np.uint16).reshape(16, 16)
    Image.fromarray(wanted * 257).save(tmp_path / "a.png")
    assert np.array_equal(read_image(tmp_path / "a.png", 1)[..., 0], wanted)
    assert np.array_equal(read_image(tmp_path / "a.png")[..., 2], wanted)
    Image.fromarray(np.full((2, 2), 70_000, dtype=np.int32)).save(tmp_path / "b.tif")
    with pytest.raises(DataError, match="expected 0 to 65535"):
        read_image(tmp_path / "b.tif")


def test_grey_in_floating_point_lies_from_zero_to_one(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, 0.2], [0.6, 1]], dtype=np.float32)).save(tmp_path / "a.tif")
    assert read_image(tmp_path / "a.tif", 1).flatten().tolist() == [0, 51, 153, 255]
    for bad in (200.0, np.nan):
        Image.fromarray(np.full((2, 2), bad, dtype=np.float32)).save(tmp_path / "b.tif")
        with pytest.raises(DataError, match="expected 0 to 1"):
            read_image(tmp_path / "b.tif")


def test_what_is_transparent_shows_white(tmp_path: Path) -> None:
    Image.new("RGBA", (2, 2), (255, 0, 0, 0)).save(tmp_path / "a.png")
    assert bool((read_image(tmp_path / "a.png") == 255).all())
    palette = Image.new("P", (2, 2), 0)
    palette.putpalette([0, 0, 0, 9, 9, 9])
    palette.putpixel((1, 0), 1)
    palette.save(tmp_path / "b.png", transparency=0)
    assert read_image(tmp_path / "b.png", 1).flatten().tolist() == [255, 9, 255, 255]


def test_files_that_are_cut_or_too_large_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_signal(tmp_path / "a.png", torch.zeros(8, 8, 3))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4)
    with pytest.raises(DataError, match=r"cannot read .*a\.png"):
        read_signal(tmp_path / "a.png")
    write_signal(tmp_path / "a.wav", torch.zeros(100, 1), 8000.0)
    whole = (tmp_path / "a.wav").read_bytes()
    for cut in (0, 6, 14, 22, 38):
        (tmp_path / "b.wav").write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"b\.wav"):
            read_signal(tmp_path / "b.wav")


@pytest.mark.parametrize("name", ["data_div2k.npz", "celeba_128_tiny.npy"])
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut", b"nothing of the kind"])
def test_archives_that_cannot_be_read_say_so(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name.replace(".", r"\.")):
        open_signal("nature" if "div2k" in name else "celeba", 3, None, str(tmp_path), 0)


@pytest.mark.parametrize("bad", [-1.0, 300.0, np.nan])
def test_archives_with_other_numbers_than_brightness_say_so(tmp_path: Path, bad: float) -> None:
    np.savez(tmp_path / "data_div2k.npz", test_data=np.full((1, 4, 4, 3), bad))
    with pytest.raises(DataError, match="from 0 to 1 or from 0 to 255"):
        open_signal("nature", 3, None, str(tmp_path), 0)


def test_states_beyond_the_budget_are_refused_before_the_first_step() -> None:
    check_memory(7_000_000, 256)
    with pytest.raises(DataError, match=r"12\.3 GB.*shrink=.*width=.*warm=false"):
        check_memory(12_000_000, 256)
    signal = Signal("image", zero_bytes(1, 1, 3).expand(3000, 4000, 3))
    task = FitSignal(net=FieldConfig(width=256), deq=RECIPE, batch=65536).with_signal(signal)
    with pytest.raises(DataError, match="warm states"):
        _ = task.steps_per_epoch
    assert replace(task, warm=False).with_signal(signal).steps_per_epoch == 184
    file = find_preset("inr-file").task
    assert isinstance(file, FitSignal)
    assert file.batch == 65536


def test_gradients_are_learnt_from_images_alone(tmp_path: Path, capsys: Any) -> None:
    write_signal(tmp_path / "a.wav", torch.zeros(100, 1), 8000.0)
    command = ["train", "inr-gradient", "--set", "data=file", "--set", f"file={tmp_path / 'a.wav'}"]
    out = tmp_path / "run"
    assert main([*command, "--set", "shrink=1", "--cpu", "--out", str(out)]) == 2
    assert "takes images, got a sound" in capsys.readouterr().err
    assert not out.exists()


def test_decoding_stops_at_the_length(tmp_path: Path) -> None:
    pytest.importorskip("av")
    write_signal(tmp_path / "a.gif", torch.rand(9, 8, 8, 3), 10.0)
    assert read_signal(tmp_path / "a.gif", length=2).shape == (2, 8, 8)
    assert fit(tmp_path / "a.gif", 0, net=NET, length=3).shape == (3, 8, 8)


@pytest.mark.parametrize("scale", [1e-3, 0.5, 1.0, 128.0, 25_000.0])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_finite_at_every_scale(kind: Any, scale: float) -> None:
    filter: Any = "fourier" if kind == "mfn" else "siren_like"
    config = FieldConfig(kind=kind, filter=filter, width=8, input_scale=scale)
    field = make_field(2, 3, config, RECIPE)
    y = field(2 * torch.rand(16, 2) - 1).prediction
    y.square().sum().backward()
    assert bool(y.isfinite().all())
    assert all(bool(p.grad.isfinite().all()) for p in field.parameters() if p.grad is not None)


def test_siren_keeps_its_frequencies_in_half_precision() -> None:
    torch.manual_seed(0)
    field = make_field(1, 1, FieldConfig(kind="siren", width=16, layers=1, input_scale=1000.0))
    x = 2 * torch.rand(32, 1) - 1
    with torch.no_grad():
        wanted = field(x).prediction
        with torch.autocast("cpu", torch.bfloat16):
            assert_close(field(x).prediction.float(), wanted, rtol=0, atol=0.02)


def test_calls_of_fields_that_cannot_be_say_why() -> None:
    field = make_field(2, 1, NET, RECIPE)
    with pytest.raises(TypeError, match=r"are torch\.float64, the field is torch\.float32"):
        field(torch.zeros(3, 2, dtype=torch.float64))
    for z0 in (torch.zeros(3, 9), torch.zeros(2, 8), torch.zeros(3, 8, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"a state of each point, \(3, 8\)"):
            field(torch.zeros(3, 2), z0)
    for kind in KINDS[1:]:
        filter: Any = "fourier" if kind == "mfn" else "siren_like"
        config = replace(NET, kind=kind, filter=filter)  # type: ignore[arg-type]
        other = make_field(2, 1, config)
        with pytest.raises(TypeError, match="no equilibrium to solve for: drop z0, f_max_iter"):
            other(torch.zeros(3, 2), torch.zeros(3, 8), f_max_iter=3)


def test_radii_are_estimated_all_over_the_signal() -> None:
    task = FitSignal(net=NET, deq=RECIPE, data="ripples")
    model = task.build().eval()
    asked: list[torch.Tensor] = []
    hook = model.register_forward_pre_hook(lambda module, args: asked.append(args[0]))
    with hook, torch.no_grad():
        task.evaluate(model, "test", True)
    assert torch.equal(asked[0], coordinates((16, 16), torch.arange(0, 256, 16)))


def test_a_picture_of_generalisation_shows_the_psnr_of_the_evaluated_pixels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from deq_zoo.inr import pictures

    titles: list[str] = []
    show = pictures._show

    def record(axes: Any, pixels: torch.Tensor, title: str) -> None:
        titles.append(title)
        show(axes, pixels, title)

    monkeypatch.setattr(pictures, "_show", record)
    task = GeneraliseImage(net=NET, deq=RECIPE, data="ripples")
    model = task.build().eval()
    (picture,) = task.pictures(model)
    assert titles[1] == f"fit\n{measure(task, model)['psnr']:.2f} dB"
    assert "diagonally between" in picture.caption


def test_the_video_preset_clips_its_gradient_by_value() -> None:
    assert find_preset("inr-video").clip_value == 0.1
