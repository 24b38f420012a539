"""Grids, targets, orders, files: what goes in and what comes out."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from deq_zoo.errors import DataError
from deq_zoo.inr import Signal, coordinates, write_signal
from deq_zoo.inr.blocks import sum_blocks
from deq_zoo.inr.data import crop, kind_of_source, open_signal, ripples
from deq_zoo.inr.order import permute, sample_batch
from deq_zoo.inr.readers import kind_of, read_image, read_signal, read_wav
from deq_zoo.inr.shapes import distance, silhouette
from deq_zoo.task import Shard


def test_an_image_is_read_by_column_and_row() -> None:
    x = coordinates((2, 3), torch.arange(6))
    assert x.tolist() == [[-1, -1], [0, -1], [1, -1], [-1, 1], [0, 1], [1, 1]]


def test_a_video_is_read_by_time_row_and_column() -> None:
    x = coordinates((2, 3, 2), torch.tensor([0, 1, 2, 11]))
    assert x.tolist() == [[-1, -1, -1], [-1, -1, 1], [-1, 0, -1], [1, 1, 1]]
    assert coordinates((5,), torch.tensor([0, 2, 4])).tolist() == [[-1], [0], [1]]


def test_a_region_is_a_part_of_the_same_grid() -> None:
    whole = coordinates((9, 9), torch.arange(81), torch.float64).view(9, 9, 2)
    part = coordinates((5, 3), torch.arange(15), torch.float64, (0.0, 0.25, 0.5, 0.5))
    assert_close(part.view(5, 3, 2), whole[:5, 2:5])


def test_bytes_become_targets_from_minus_one_to_one() -> None:
    signal = Signal("image", torch.tensor([[[0], [255]], [[51], [128]]], dtype=torch.uint8))
    wanted = torch.tensor([[-1.0], [1.0], [-0.6], [2 * 128 / 255 - 1]])
    assert_close(signal.targets(torch.arange(4)), wanted)
    sound = Signal("audio", torch.tensor([[0.5], [-1.0]]), 8000.0)
    assert sound.targets(torch.arange(2)).tolist() == [[0.5], [-1.0]]


def test_psnr_of_a_video_is_the_mean_over_frames() -> None:
    signal = Signal("video", torch.zeros(2, 3, 4, 3, dtype=torch.uint8), 25.0)
    values = torch.full((24, 3), -1.0)
    values[:12] += 0.2  # 0.1 in brightness: 20 dB
    values[12:] += 0.02  # 40 dB
    errors = signal.squared_errors(values, torch.arange(24))
    assert signal.psnr(errors) == pytest.approx(30.0, abs=1e-4)


def test_values_beyond_the_range_are_clipped_in_pictures_but_not_in_sounds() -> None:
    image = Signal("image", torch.full((1, 1, 1), 255, dtype=torch.uint8))
    assert float(image.squared_errors(torch.tensor([[5.0]]), torch.tensor([0]))) == 0
    sound = Signal("audio", torch.ones(1, 1))
    assert float(sound.squared_errors(torch.tensor([[3.0]]), torch.tensor([0]))) == 4


def test_a_signal_of_the_wrong_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="2 axes and channels"):
        Signal("image", torch.zeros(3, 3))
    with pytest.raises(ValueError, match="not be empty"):
        Signal("audio", torch.zeros(0, 1))


@given(n=st.integers(1, 700), seed=st.integers(0, 99))
def test_an_order_is_a_permutation(n: int, seed: int) -> None:
    result = permute(n, torch.arange(n), seed)
    assert sorted(result.tolist()) == list(range(n))


def test_orders_differ_by_key_and_look_random() -> None:
    n = 10_000
    a, b = (permute(n, torch.arange(n), key).double() for key in (0, 1))
    assert not torch.equal(a, b)
    place = torch.arange(n).double()
    for order in (a, b):
        assert abs(float(torch.corrcoef(torch.stack((place, order)))[0, 1])) < 0.05
        assert float((order.diff() == 1).double().mean()) < 0.01
        halves = (order[: n // 2] < n / 2).double().mean()
        assert float(halves) == pytest.approx(0.5, abs=0.03)
    far = permute(43_520_000, torch.arange(0, 43_520_000, 100_000), 3)
    assert int(far.max()) < 43_520_000


def test_an_epoch_visits_every_point_once_and_shards_share_it() -> None:
    batches = [sample_batch(103, 25, step, 7) for step in range(5)]
    assert [len(b) for b in batches] == [25, 25, 25, 25, 3]
    assert sorted(torch.cat(batches).tolist()) == list(range(103))
    assert all(bool((b.diff() > 0).all()) for b in batches)
    parts = [sample_batch(103, 25, 2, 7, Shard(rank, 2)) for rank in range(2)]
    assert sorted(torch.cat(parts).tolist()) == batches[2].tolist()
    assert sample_batch(103, 25, 5, 7).tolist() != batches[0].tolist()


def test_a_sum_of_blocks_has_the_gradient_of_the_whole() -> None:
    w = torch.randn(3, dtype=torch.float64, requires_grad=True)
    unused = torch.randn(2, requires_grad=True)
    x = torch.randn(10, 3, dtype=torch.float64)
    whole = (x @ w).square().sum()
    parts = sum_blocks(((part @ w).square().sum() for part in x.split(4)), [w, unused])
    assert_close(parts, whole)
    (3 * parts).backward()
    (wanted,) = torch.autograd.grad(3 * whole, w)
    assert_close(w.grad, wanted)
    assert unused.grad is None
    with pytest.raises(ValueError, match="no block"):
        sum_blocks([], [w])


def test_an_image_file_goes_round(tmp_path: Path) -> None:
    pixels = ripples(3)
    write_signal(tmp_path / "a.png", pixels.float() / 127.5 - 1)
    assert torch.equal(read_image(tmp_path / "a.png"), pixels)
    assert read_image(tmp_path / "a.png", channels=1).shape == (16, 16, 1)
    signal = read_signal(tmp_path / "a.png")
    assert (signal.kind, signal.shape) == ("image", (16, 16))


def test_a_sound_file_goes_round_and_reaches_one(tmp_path: Path) -> None:
    t = torch.linspace(0, 20, 400)
    write_signal(tmp_path / "a.wav", (0.5 * t.sin())[:, None], 8000.0)
    signal = read_wav(tmp_path / "a.wav")
    assert signal.rate == 8000
    assert float(signal.values.abs().max()) == 1
    assert_close(signal.values[:, 0], t.sin() / t.sin().abs().max(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("width", [1, 2])
def test_wav_files_of_the_standard_library_are_read(tmp_path: Path, width: int) -> None:
    left = np.array([0, 50, -100, 25])
    kind: Any = np.uint8 if width == 1 else np.int16
    samples = np.stack((left, left), axis=1) + (128 if width == 1 else 0)
    with wave.open(str(tmp_path / "b.wav"), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(width)
        file.setframerate(100)
        file.writeframes(samples.astype(kind).tobytes())
    signal = read_wav(tmp_path / "b.wav")
    assert_close(signal.values[:, 0], torch.tensor([0, 0.5, -1, 0.25]))


@pytest.mark.parametrize("suffix", ["mp4", "gif"])
def test_a_video_file_goes_round(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("av")
    frames = torch.stack([ripples(3, 32).float() * s for s in (0.4, 0.7, 1.0)]) / 127.5 - 1
    write_signal(tmp_path / f"a.{suffix}", frames[:, :31, :29], 10.0)
    signal = read_signal(tmp_path / f"a.{suffix}")
    assert signal.kind == "video"
    assert signal.rate == pytest.approx(10.0, rel=0.01)
    assert signal.shape == ((3, 32, 30) if suffix == "mp4" else (3, 31, 29))
    values = signal.targets(torch.arange(len(signal))).view(*signal.shape, 3)
    assert float((values[:, :31, :29] - frames[:, :31, :29]).abs().mean()) < 0.08


def test_parts_of_signals() -> None:
    image = Signal("image", torch.arange(48, dtype=torch.uint8).view(4, 4, 3))
    assert crop(image, side=2).values.tolist() == image.values[1:3, 1:3].tolist()
    halved = crop(image, shrink=2)
    assert halved.shape == (2, 2)
    mean = image.values[:2, :2].float().mean((0, 1)).round()
    assert halved.values[0, 0].tolist() == mean.tolist()
    sound = Signal("audio", torch.arange(9.0)[:, None], 4.0)
    assert len(crop(sound, length=5)) == 5
    with pytest.raises(DataError, match="side and shrink are options for pictures"):
        crop(sound, side=100)
    with pytest.raises(DataError, match="length is an option for sounds and videos"):
        crop(image, length=2)
    with pytest.raises(DataError, match="does not fit"):
        crop(image, side=5)
    with pytest.raises(DataError, match="cannot shrink"):
        crop(image, shrink=9)


def test_the_papers_files_are_found(tmp_path: Path) -> None:
    images = np.arange(2 * 8 * 8 * 3, dtype=np.uint8).reshape(2, 8, 8, 3)
    np.savez(tmp_path / "data_div2k.npz", test_data=images)
    np.save(tmp_path / "celeba_128_tiny.npy", np.zeros((2 * 128, 128, 3), dtype=np.float32))
    second = open_signal("nature", 3, None, str(tmp_path), 1)
    assert second.values.tolist() == images[1].tolist()
    assert open_signal("celeba", 3, None, str(tmp_path), 1).shape == (128, 128)
    with pytest.raises(DataError, match="has 2 signals, numbered from 0: got index=2"):
        open_signal("nature", 3, None, str(tmp_path), 2)
    with pytest.raises(DataError, match=r"data_2d_text\.npz or files that end in"):
        open_signal("text", 3, None, str(tmp_path), 0)
    with pytest.raises(DataError, match="--data-dir"):
        open_signal("audio", 3, None, None, 0)
    with pytest.raises(DataError, match="no folder"):
        open_signal("video", 3, None, str(tmp_path / "none"), 0)


def test_photographs_come_in_one_or_three_channels() -> None:
    grey, colour = (open_signal("camera", c, None, None, 0) for c in (1, 3))
    assert grey.values.shape == (512, 512, 1)
    assert torch.equal(colour.values[..., 2:], grey.values)
    assert open_signal("chelsea", 1, None, None, 0).values.shape == (300, 451, 1)


def test_files_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    assert kind_of(Path("x.JPG")) == "image"
    assert kind_of_source("file", "a.wav") == "audio"
    with pytest.raises(DataError, match="no image, sound or video by its name"):
        kind_of(Path("x.txt"))
    with pytest.raises(DataError, match="--set file=PATH"):
        kind_of_source("file", None)
    with pytest.raises(DataError, match="there is no file"):
        read_signal(tmp_path / "a.png")
    for name in ("a.png", "a.wav", "a.mp4"):
        (tmp_path / name).write_bytes(b"nothing of the kind")
        with pytest.raises(DataError, match=f"(cannot read .*{name})|({name} cannot be read)"):
            read_signal(tmp_path / name)


@pytest.mark.parametrize(("name", "d"), [("disc", 2), ("box", 2), ("sphere", 3), ("torus", 3)])
def test_distances_have_gradients_of_length_one(name: Any, d: int) -> None:
    x = (2 * torch.rand(50, d, dtype=torch.float64) - 1).requires_grad_()
    (gradient,) = torch.autograd.grad(distance(name)(x).sum(), x)
    assert_close(gradient.norm(dim=1), torch.ones(50, dtype=torch.float64))


def test_known_distances() -> None:
    assert float(distance("torus")(torch.tensor([[0.6, 0, 0]]))) == pytest.approx(-0.25)
    assert float(distance("box")(torch.tensor([[0.9, 0.8]]))) == pytest.approx(0.5)
    row, column = torch.meshgrid(*[torch.linspace(-1, 1, 201)] * 2, indexing="ij")
    result = silhouette(column**2 + row**2 < 0.36)
    x = 2 * torch.rand(100, 2) - 1
    assert_close(result(x), distance("disc")(x), rtol=0, atol=0.02)
    with pytest.raises(DataError, match="inside and outside"):
        silhouette(torch.zeros(3, 3, dtype=torch.bool))
    with pytest.raises(DataError, match="a silhouette needs an image"):
        distance("silhouette")
