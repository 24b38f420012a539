"""Optical flow data sets in their public layouts: which files make a pair.

A set lists its files and opens one pair at a time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

import torch

from deq_zoo.errors import DataError
from deq_zoo.flow.augment import Pair
from deq_zoo.flow.chairs_split import PAIRS, VALIDATION
from deq_zoo.flow.formats import read_flow
from deq_zoo.images.files import read_image


@dataclass(frozen=True)
class Files:
    """The files of a pair.

    Args:
        image1: the first frame.
        image2: the second frame.
        flow: the true flow; None in a test set.
        scene: the name of the scene.
    """

    image1: Path
    image2: Path
    flow: Path | None = None
    scene: str = ""

    def load(self) -> Pair:
        """Read the pair; without a true flow, the flow is zero and nowhere valid."""
        image1, image2 = read_image(self.image1), read_image(self.image2)
        if self.flow is None:
            flow = torch.zeros(2, *image1.shape[1:])
            return Pair(image1, image2, flow, torch.zeros(image1.shape[1:], dtype=torch.bool))
        flow, valid = read_flow(self.flow)
        if image1.shape != image2.shape or flow.shape[1:] != image1.shape[1:]:
            raise DataError(
                f"{self.image1}, {self.image2} and {self.flow} differ in size: "
                f"{[tuple(t.shape[1:]) for t in (image1, image2, flow)]}"
            )
        return Pair(image1, image2, flow, valid)


@dataclass(frozen=True)
class FlowSet:
    """Pairs on disk.

    Args:
        name: the name of the set.
        files: the files of every pair.
        sparse: whether the true flow is sparse, as KITTI's, which changes how errors are counted.
        masked: whether the set is usually reported without extreme flows, too.
    """

    name: str
    files: tuple[Files, ...]
    sparse: bool = False
    masked: bool = False

    def __post_init__(self) -> None:
        if not self.files:
            raise DataError(f"there is no pair of {self.name}: its folders hold too few frames")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Pair:
        return self.files[index].load()


def chairs(root: str | Path, split: str = "train") -> FlowSet:
    """Open FlyingChairs: `train`, `val` or `all` of the pairs in a folder or its `data`.

    The official split belongs to the whole set. A part of it needs a file
    `FlyingChairs_train_val.txt` beside the images that says 1 (training) or 2 for each pair.
    """
    folder = _first_folder(Path(root) / "data", Path(root))
    flows = sorted(folder.glob("*.flo"))
    images = sorted(folder.glob("*.ppm"))
    if not flows or len(images) != 2 * len(flows):
        raise DataError(
            f"{folder} should hold FlyingChairs, two .ppm images for every .flo, but has "
            f"{len(images)} and {len(flows)}"
        )
    files = []
    for flow, a, b in zip(flows, images[::2], images[1::2], strict=True):
        number = flow.name.partition("_")[0]
        if not (a.name.startswith(number) and b.name.startswith(number)):
            raise DataError(f"{flow.name} does not belong to {a.name} and {b.name}")
        files.append(Files(a, b, flow))
    _check_option(split, ("train", "val", "all"))
    if split == "all":
        return FlowSet("chairs", tuple(files))
    val = _chairs_validation(folder, len(files))
    chosen = [each for k, each in enumerate(files) if (k in val) == (split == "val")]
    return FlowSet("chairs", tuple(chosen))


def _chairs_validation(folder: Path, count: int) -> frozenset[int]:
    """Return the places of the validation pairs in the sorted list of flows."""
    for place in (folder, folder.parent):
        listed = place / "FlyingChairs_train_val.txt"
        if listed.exists():
            marks = listed.read_text().split()
            if len(marks) != count or not set(marks) <= {"1", "2"}:
                raise DataError(f"{listed} must hold 1 or 2 for each of {count} pairs")
            return frozenset(k for k, mark in enumerate(marks) if mark == "2")
    if count != PAIRS:
        raise DataError(
            f"{folder} has {count} pairs, FlyingChairs has {PAIRS}: complete it, or put a file "
            "FlyingChairs_train_val.txt there that says 1 (training) or 2 for each pair"
        )
    return VALIDATION


def things(
    root: str | Path, passes: Sequence[str] = ("clean", "final"), split: str = "TRAIN"
) -> FlowSet:
    """Open FlyingThings3D: pairs forward and backward in time, left camera, `TRAIN` or `TEST`."""
    root = Path(root)
    _check_option(split, ("TRAIN", "TEST"))
    files = []
    for each in passes:
        _check_option(each, ("clean", "final"))
        frames = root / f"frames_{each}pass" / split
        for scene in _folders(frames, "*/*"):
            images = sorted((scene / "left").glob("*.png"))
            for way in ("into_future", "into_past"):
                name = f"{scene.parent.name}/{scene.name}"
                flows = sorted((root / "optical_flow" / split / name / way / "left").glob("*.pfm"))
                lone = {*map(_number, images)} ^ {*map(_number, flows)}
                if lone:
                    raise DataError(
                        f"{scene} has {len(images)} frames and {len(flows)} flows {way}, and "
                        f"number {min(lone)} of one alone: FlyingThings3D is incomplete"
                    )
                _check_gaps(images)
                for k in range(len(flows) - 1):
                    a, b = (k, k + 1) if way == "into_future" else (k + 1, k)
                    files.append(Files(images[a], images[b], flows[a], name))
    return FlowSet("things", tuple(files), masked=True)


def sintel(root: str | Path, split: str = "training", rendering: str = "clean") -> FlowSet:
    """Open MPI-Sintel: consecutive frames of each scene, `clean` or `final`."""
    root = Path(root)
    _check_option(split, ("training", "test"))
    _check_option(rendering, ("clean", "final"))
    frames = root / split / rendering
    files = []
    for scene in _folders(frames, "*"):
        images = sorted(scene.glob("*.png"))
        _check_gaps(images)
        for a, b in pairwise(images):
            flow = root / split / "flow" / scene.name / f"{a.stem}.flo"
            files.append(Files(a, b, flow if split == "training" else None, scene.name))
    return FlowSet(f"sintel_{rendering}", _existing_files(files))


def kitti(root: str | Path, split: str = "training") -> FlowSet:
    """Open KITTI 2015."""
    _check_option(split, ("training", "testing"))
    folder = Path(root) / split
    first = sorted((folder / "image_2").glob("*_10.png"))
    if not first:
        raise DataError(f"{folder / 'image_2'} should hold KITTI 2015's frames *_10.png")
    truth = folder / "flow_occ"
    files = [
        Files(a, a.with_name(a.name.replace("_10.", "_11.")),
              truth / a.name if split == "training" else None, a.stem)
        for a in first
    ]  # fmt: skip
    return FlowSet("kitti", _existing_files(files), sparse=True)


def hd1k(root: str | Path) -> FlowSet:
    """Open HD1K's training pairs."""
    frames = Path(root) / "hd1k_input" / "image_2"
    truth = Path(root) / "hd1k_flow_gt" / "flow_occ"
    files = []
    for scene, group in groupby(sorted(frames.glob("*.png")), lambda p: p.name.partition("_")[0]):
        images = list(group)
        apart = _gaps(images)  # where a recording pauses, two frames make no pair
        files += [Files(a, b, truth / a.name, scene) for a, b in pairwise(images) if a not in apart]
    if not files:
        raise DataError(f"{frames} should hold HD1K's frames, as 000000_0010.png")
    return FlowSet("hd1k", _existing_files(files), sparse=True)


def middlebury(root: str | Path) -> FlowSet:
    """Open Middlebury's pairs with true flow, `SCENE/frame10.png, frame11.png, flow10.flo`.

    Frames and flows are two archives, `other-data` and `other-gt-flow`, in one folder or in two.
    """
    root = Path(root)
    apart = (root / "other-gt-flow").is_dir()
    flows, frames = (root / "other-gt-flow", root / "other-data") if apart else (root, root)
    files = []
    for flow in sorted(flows.glob("*/flow10.flo")):
        folder = frames / flow.parent.name
        files.append(Files(folder / "frame10.png", folder / "frame11.png", flow, folder.name))
    if not files:
        raise DataError(f"{root} should hold folders of Middlebury with frame10.png and flow10.flo")
    return FlowSet("middlebury", _existing_files(files))


def _first_folder(*places: Path) -> Path:
    for place in places:
        if place.is_dir():
            return place
    raise DataError(f"there is no folder {places[-1]}")


def _folders(root: Path, pattern: str) -> list[Path]:
    folders = sorted(p for p in root.glob(pattern) if p.is_dir())
    if not folders:
        raise DataError(f"{root} should hold a folder for each scene, but has none")
    return folders


def _existing_files(files: list[Files]) -> tuple[Files, ...]:
    """Return the files of pairs, or raise for a missing one: before training, not within."""
    for pair in files:
        for path in (pair.image1, pair.image2, pair.flow):
            if path is not None and not path.exists():
                raise DataError(f"{path} is missing: unpack the archives of this set once more")
    return tuple(files)


def _number(path: Path) -> int:
    """Return the number of a frame: 6 of `frame_0006` and of `OpticalFlowIntoFuture_0006_L`."""
    digits = re.findall(r"\d+", path.stem)
    if not digits:
        raise DataError(f"{path} should have the number of its frame in its name")
    return int(digits[-1])


def _gaps(images: list[Path], least: int | None = None) -> set[Path]:
    """Return the frames of a scene whose next frame is missing.

    Args:
        images: the frames, sorted.
        least: the distance between the numbers of neighbours; None takes the smallest of all.
    """
    steps = {a: _number(b) - _number(a) for a, b in pairwise(images)}
    near = least or min(steps.values(), default=1)
    return {a for a, step in steps.items() if step > near}


def _check_gaps(images: list[Path]) -> None:
    gaps = _gaps(images, least=1)
    if gaps:
        raise DataError(f"the frame after {min(gaps)} is missing: unpack the archives once more")


def _check_option(value: str, options: tuple[str, ...]) -> None:
    if value not in options:
        raise ValueError(f"expected one of {', '.join(options)}, got {value!r}")
