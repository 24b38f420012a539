"""Images to learn from: digits, folders and CIFAR-10."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from deq_zoo.diffusion import data as sets
from deq_zoo.diffusion.model import DIGITS
from deq_zoo.diffusion.task import Denoise
from deq_zoo.errors import DataError
from tests.zoo.diffusion.nets import write_picture


def test_digits_are_split_once_and_for_all() -> None:
    train, validation = sets.digits("train"), sets.digits("val")
    assert (len(train), len(validation)) == (4500, 500)
    x = train.take(torch.arange(5))
    assert x.shape == (5, 1, DIGITS.size, DIGITS.size)
    assert float(x.min()) == -1.0
    assert float(x.max()) <= 1.0
    rows = {row.numpy().tobytes() for row in validation.take(torch.arange(500))}
    assert not any(row.numpy().tobytes() in rows for row in train.take(torch.arange(4500)))


def test_bytes_and_floats() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    assert torch.equal(sets.to_bytes(sets.scaled(every)), every)
    assert sets.to_bytes(torch.tensor([-3.0, 3.0])).tolist() == [0, 255]


def test_folders_of_images(tmp_path: Path) -> None:
    for k in range(40):
        write_picture(tmp_path / f"{k:02}.png", level=k)
    train, validation = (sets.folder(tmp_path, split, 8, 3) for split in ("train", "val"))
    assert (len(train), len(validation)) == (38, 2)
    assert train.take(torch.tensor([0])).shape == (1, 3, 8, 8)
    assert float(train.take(torch.tensor([0]))[0, 2].min()) == 1.0
    grey = sets.read_image(tmp_path / "00.png", 8, 1)
    assert grey.shape == (1, 8, 8)
    write_picture(tmp_path / "new" / "train" / "a.png")
    write_picture(tmp_path / "new" / "val" / "b.png")
    assert len(sets.folder(tmp_path / "new", "train", 8, 3)) == 1
    write_picture(tmp_path / "half" / "train" / "a.png")
    for split in ("train", "val"):
        with pytest.raises(DataError, match="has train/ but no val/: add it, or put all"):
            sets.folder(tmp_path / "half", split, 8, 3)
    (tmp_path / "list_eval_partition.txt").write_text("00.png 0\n01.png 1\n02.png 2\n")
    assert len(sets.folder(tmp_path, "train", 8, 3)) == 1
    with pytest.raises(DataError, match="put image files there"):
        sets.folder(tmp_path / "none", "train", 8, 3)
    (tmp_path / "bad.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"bad\.png"):
        sets.read_image(tmp_path / "bad.png", 8, 3)


def test_pictures_are_read_as_they_look(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    grey = np.tile(np.linspace(0, 65535, 8), (8, 1)).astype(np.uint16)
    Image.fromarray(grey).save(path)
    expected = torch.linspace(-1, 1, 8).expand(8, 8)
    assert float((sets.read_image(path, 8, 1)[0] - expected).abs().max()) < 1 / 127
    clear = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    clear.paste((255, 0, 0, 255), (0, 0, 4, 8))
    clear.save(path)
    red, green, _ = sets.read_image(path, 8, 3)
    assert torch.equal(red, torch.ones(8, 8))
    assert torch.equal(green[0], torch.tensor([-1.0] * 4 + [1.0] * 4))
    half = Image.new("L", (8, 8), 0)
    half.paste(255, (0, 0, 8, 4))
    turned = Image.Exif()
    turned[0x0112] = 3  # upside down
    half.save(path, exif=turned)
    assert torch.equal(sets.read_image(path, 8, 1)[0, :, 0], green[0])


def test_long_pictures_are_cut_and_small_faces_refused(tmp_path: Path) -> None:
    write_picture(tmp_path / "long.png", width=20_000, height=2)
    assert sets.read_image(tmp_path / "long.png", 64, 3).shape == (3, 64, 64)
    write_picture(tmp_path / "face.png", width=178, height=218)
    assert sets.read_image(tmp_path / "face.png", 64, 3, sets.CELEBA_BOX).shape == (3, 64, 64)
    write_picture(tmp_path / "face.png", width=64, height=64)
    with pytest.raises(DataError, match="64 x 64, too small"):
        sets.read_image(tmp_path / "face.png", 64, 3, sets.CELEBA_BOX)


def test_cifar10_holds_out_training_images(tmp_path: Path) -> None:
    """One training image in fifty is held out; test images are not even looked at."""
    pixels = torch.arange(60 * 3072).remainder(251).to(torch.uint8).view(60, 3, 32, 32)
    for k, part in enumerate(pixels.split(12), start=1):
        data = {b"data": part.reshape(12, -1).numpy(), b"labels": [0] * 12}
        (tmp_path / f"data_batch_{k}").write_bytes(pickle.dumps(data))
    other = tmp_path / "npz"
    other.mkdir()
    archive = other / "cifar10_lossless_train.npz"
    np.savez(archive, x=pixels.permute(0, 2, 3, 1).numpy(), y=np.zeros(60))
    for root in (tmp_path, other):
        train, validation = (sets.cifar10(root, split) for split in ("train", "val"))
        assert torch.equal(sets.to_bytes(validation.take(torch.arange(2))), pixels[[0, 50]])
        seen = sets.to_bytes(train.take(torch.arange(58)))
        assert torch.equal(seen, torch.cat((pixels[1:50], pixels[51:])))
        assert (len(train), len(validation)) == (58, 2)
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({b"data": Path("x")}))
    with pytest.raises(DataError, match="no array"):
        sets.cifar10(tmp_path, "val")
    with pytest.raises(DataError, match="cifar-10-python"):
        sets.cifar10(tmp_path / "none", "train")
    with pytest.raises(DataError, match="--data-dir"):
        _ = Denoise().train_set
