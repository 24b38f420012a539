"""Crops, flips and resizes against Pillow, formulas and their own randomness."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.testing import assert_close

from deq_zoo.images.cifar import CIFAR10_CHANNELS
from deq_zoo.images.labelled import IMAGENET_CHANNELS
from deq_zoo.images.mnist import MNIST_CHANNELS
from deq_zoo.mdeq import augment


def make_generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw_bytes(*shape: int) -> Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, generator=make_generator(1))


def test_normalise_is_its_formula_and_leaves_the_pixels_alone() -> None:
    pixels = draw_bytes(2, 3, 4, 5)
    before = pixels.clone()
    out = augment.normalise(pixels, IMAGENET_CHANNELS, torch.float64)
    for c, (mean, std) in enumerate(zip(*IMAGENET_CHANNELS, strict=True)):
        assert_close(out[:, c], (before[:, c].double() / 255 - mean) / std)
    assert torch.equal(pixels, before)
    single = augment.normalise(pixels[0], CIFAR10_CHANNELS)
    assert (single.dtype, single.shape) == (torch.float32, (3, 4, 5))
    assert augment.normalise(pixels[:0], CIFAR10_CHANNELS).shape == (0, 3, 4, 5)
    last = pixels.contiguous(memory_format=torch.channels_last)
    assert augment.normalise(last, CIFAR10_CHANNELS).is_contiguous(
        memory_format=torch.channels_last
    )


def test_every_crop_is_a_window_of_the_padded_image_and_all_windows_come() -> None:
    image = torch.arange(1, 26, dtype=torch.uint8).reshape(1, 1, 5, 5)
    padded = torch.zeros(7, 7, dtype=torch.uint8)
    padded[1:6, 1:6] = image[0, 0]
    windows = {
        tuple(padded[i : i + 5, j : j + 5].flatten().tolist()) for i in range(3) for j in range(3)
    }
    crops = augment.random_crop(image.expand(200, 1, 5, 5), 5, make_generator(), padding=1)
    assert crops.dtype == torch.uint8
    assert {tuple(crop.flatten().tolist()) for crop in crops} == windows


def test_crops_keep_channels_together_and_fit_rectangles() -> None:
    images = draw_bytes(6, 1, 9, 7).expand(6, 3, 9, 7)
    crops = augment.random_crop(images, 4, make_generator())
    assert crops.shape == (6, 3, 4, 4)
    assert torch.equal(crops[:, 0], crops[:, 2])
    whole = augment.random_crop(images[..., :7, :], 7, make_generator())
    assert torch.equal(whole, images[..., :7, :])


def test_flips_mirror_whole_images_with_the_given_probability() -> None:
    images = draw_bytes(400, 3, 2, 4)
    flipped = augment.random_flip(images, make_generator())
    mirrored = (flipped == images.flip(-1)).all(dim=(1, 2, 3))
    assert bool(((flipped == images).all(dim=(1, 2, 3)) | mirrored).all())
    assert 160 < int(mirrored.sum()) < 240
    assert torch.equal(augment.random_flip(images, make_generator(), p=0.0), images)
    assert torch.equal(augment.random_flip(images, make_generator(), p=1.0), images.flip(-1))


def test_randomness_comes_from_the_generator_alone() -> None:
    images = draw_bytes(8, 3, 12, 12)

    def draw_everything() -> list[Tensor]:
        g = make_generator(5)
        return [
            augment.random_crop(images, 8, g, padding=2),
            augment.random_flip(images, g),
            augment.random_resized_crop(images[0], 6, g),
        ]

    state = torch.get_rng_state()
    first = draw_everything()
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert all(map(torch.equal, first, draw_everything()))


@pytest.mark.parametrize("shape", [(37, 53), (8, 8), (40, 16), (100, 11)])
@pytest.mark.parametrize("size", [(16, 16), (5, 30)])
def test_resizing_is_pillows_triangle_filter(shape: tuple[int, int], size: tuple[int, int]) -> None:
    image = draw_bytes(3, *shape)
    pillow = Image.fromarray(image.permute(1, 2, 0).numpy())
    expected = np.asarray(pillow.resize(size[::-1], Image.Resampling.BILINEAR)).astype(int)
    got = augment.resize(image, *size)
    assert got.dtype == torch.uint8
    assert np.abs(got.permute(1, 2, 0).numpy().astype(int) - expected).max() <= 1
    assert_close(augment.resize(image[None], *size)[0], got)


def test_resizing_keeps_floats_and_same_sizes() -> None:
    image = torch.rand(3, 10, 10, dtype=torch.float64)
    assert augment.resize(image, 10, 10) is image
    assert augment.resize(image, 4, 6).dtype == torch.float64
    assert_close(augment.resize(torch.full((1, 8, 8), 7.0), 3, 3), torch.full((1, 3, 3), 7.0))


def test_the_shorter_side_decides_and_the_middle_is_kept() -> None:
    assert augment.resize_shorter(draw_bytes(3, 300, 500), 256).shape == (3, 256, 426)
    assert augment.resize_shorter(draw_bytes(3, 80, 40), 20).shape == (3, 40, 20)
    grid = torch.arange(30).reshape(1, 5, 6)
    assert augment.center_crop(grid, 3).tolist() == [[[7, 8, 9], [13, 14, 15], [19, 20, 21]]]


def test_boxes_lie_inside_and_keep_their_ranges() -> None:
    g, area, aspect = make_generator(), (0.1, 1.0), (0.8, 1.25)
    shares = []
    for _ in range(500):
        top, left, h, w = augment.random_box(60, 80, g, area, aspect)
        assert 0 <= top <= 60 - h
        assert 0 <= left <= 80 - w
        assert 0.75 < w / h < 1.34  # rounded to pixels
        shares.append(h * w / 4800)
    assert 0.09 < min(shares) < 0.15
    assert 0.85 < max(shares) <= 75 / 80  # the widest box is 60 high and 75 wide


def test_an_image_no_box_fits_gives_its_middle() -> None:
    assert augment.random_box(10, 100, make_generator(), (1.0, 1.0), (0.8, 1.25)) == (0, 44, 10, 12)
    assert augment.random_box(100, 10, make_generator(), (1.0, 1.0), (0.8, 1.25)) == (44, 0, 12, 10)
    one = draw_bytes(3, 1, 1)
    assert augment.random_resized_crop(one, 4, make_generator()).shape == (3, 4, 4)


def test_refuses_what_does_not_fit() -> None:
    images = draw_bytes(2, 3, 8, 8)
    with pytest.raises(TypeError, match=r"bytes \(torch.uint8\), got torch.float32"):
        augment.normalise(images.float(), CIFAR10_CHANNELS)
    with pytest.raises(ValueError, match=r"\(..., 1, height, width\), got \(2, 3, 8, 8\)"):
        augment.normalise(images, MNIST_CHANNELS)
    with pytest.raises(ValueError, match="square of 9 does not fit into 8 x 8"):
        augment.random_crop(images, 9, make_generator())
    with pytest.raises(ValueError, match="square of 9 does not fit"):
        augment.center_crop(images, 9)
    with pytest.raises(ValueError, match=r"\(B, C, H, W\), got \(3, 8, 8\)"):
        augment.random_flip(images[0], make_generator())
    with pytest.raises(ValueError, match="area must rise"):
        augment.random_resized_crop(images[0], 4, make_generator(), area=(0.5, 1.5))
