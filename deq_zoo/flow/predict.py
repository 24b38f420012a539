"""Flow of files: pairs and sequences of pictures, videos, and the test sets of benchmarks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from deq_zoo.errors import ZooError
from deq_zoo.flow.colours import flow_to_colour
from deq_zoo.flow.datasets import kitti, sintel
from deq_zoo.flow.formats import read_image, write_flo, write_image, write_kitti
from deq_zoo.flow.model import DEQFlow
from deq_zoo.flow.video import FlowStream, Frame, read_frames

_EXACT = 0.1  # pixels, for what is compared with others
PICTURES = (".png", ".jpg", ".jpeg", ".ppm", ".pgm", ".bmp", ".tif", ".tiff", ".webp")


def predict_files(
    model: DEQFlow, files: Sequence[Path], out: Path, device: torch.device
) -> Iterator[str]:
    """Two pictures, a sequence of them, videos, or the folder of Sintel or KITTI."""
    if len(files) == 1 and files[0].is_dir():
        yield from write_submission(model, files[0], out, device)
    elif all(file.suffix.lower() in PICTURES for file in files):
        if len(files) < 2:
            raise ZooError("flow needs two pictures, or a video: name the next frame as well")
        yield from _pictures(model, files, out, device)
    elif any(file.suffix.lower() in PICTURES or file.is_dir() for file in files):
        raise ZooError("give pictures, or videos, or one folder: not several kinds at once")
    else:
        _check_names(files, files, out)
        for file in files:
            yield from _video(model, file, out, device)


def _video(model: DEQFlow, file: Path, out: Path, device: torch.device) -> Iterator[str]:
    """Files are numbered by the first frame of each pair."""
    stream, pairs = FlowStream(model), 0
    for k, frame in enumerate(read_frames(file)):
        found = stream.push(frame.to(device))
        if found is not None:
            pairs += 1
            yield _save(found, out, f"{file.stem}_{k - 1:05d}")
    if not pairs:
        raise ZooError(f"{file} has no two frames of one size: flow needs a pair")


def _pictures(
    model: DEQFlow, files: Sequence[Path], out: Path, device: torch.device
) -> Iterator[str]:
    _check_names(files[:-1], files, out)
    _check_sizes(files)
    if len(files) == 2:
        with torch.no_grad():
            flows, _, stats = model(*(_frame(file, device) for file in files))
        yield _save(Frame(flows[-1], stats.nfe, False), out, files[0].stem)
        return
    frames = (_frame(file, device) for file in files)
    for file, found in zip(files, FlowStream(model)(frames), strict=False):
        yield _save(found, out, file.stem)


def _check_names(named: Sequence[Path], read: Sequence[Path], out: Path) -> None:
    """What is written is named after these files: no result may replace another, or a file read."""
    twice = [stem for stem, count in Counter(file.stem for file in named).items() if count > 1]
    if twice:
        raise ZooError(
            f"several files are called {twice[0]}, and so would be their flows: rename one, or "
            "give them one by one with an --out each"
        )
    written = {(out / f"{file.stem}_flow.png").resolve() for file in named}
    lost = [file for file in read if file.resolve() in written]
    if lost:
        raise ZooError(f"{lost[0]} would be overwritten: choose another --out")


def _check_sizes(files: Sequence[Path]) -> None:
    """One by one, so that long sequences need no memory."""
    sizes = [tuple(read_image(file).shape[1:]) for file in files]
    for file, size in zip(files, sizes, strict=True):
        if size != sizes[0]:
            raise ZooError(
                f"all pictures must have one size, got {sizes[0]} of {files[0]} and {size} of "
                f"{file}, as height and width"
            )


def _save(found: Frame, out: Path, name: str) -> str:
    flow = found.flow[0].float().cpu()
    write_flo(out / f"{name}.flo", flow)
    write_image(out / f"{name}_flow.png", flow_to_colour(flow))
    start = ", from the last pair's state" if found.reused else ""
    length = float(flow.square().sum(0).sqrt().mean())
    return f"{out / name}.flo: mean motion {length:.2f} px, {found.nfe} evaluations of f{start}"


def write_submission(model: DEQFlow, root: Path, out: Path, device: torch.device) -> Iterator[str]:
    """The test set of Sintel (`test`) or KITTI (`testing`) in the form its server takes."""
    if (root / "testing").is_dir():
        yield from _kitti_submission(model, root, out, device)
    elif (root / "test").is_dir():
        yield from _sintel_submission(model, root, out, device)
    else:
        raise ZooError(
            f"{root} is neither Sintel, with a folder test, nor KITTI 2015, with a folder testing"
        )


def _sintel_submission(
    model: DEQFlow, root: Path, out: Path, device: torch.device
) -> Iterator[str]:
    for rendering in ("clean", "final"):
        stream, scene = FlowStream(model, tolerance=_EXACT), ""
        for files in sintel(root, "test", rendering).files:
            if files.scene != scene:
                stream.reset()
                stream.push(_frame(files.image1, device))
                scene = files.scene
            found = stream.push(_frame(files.image2, device))
            if found is None:
                raise ZooError(f"{files.image2} differs in size from the frame before")
            place = out / rendering / scene / f"{files.image1.stem}.flo"
            write_flo(place, found.flow[0])
            yield f"{place}: {found.nfe} evaluations"


def _kitti_submission(model: DEQFlow, root: Path, out: Path, device: torch.device) -> Iterator[str]:
    for files in kitti(root, "testing").files:
        _check_sizes((files.image1, files.image2))
        with torch.no_grad():
            flows, _, stats = model(
                _frame(files.image1, device), _frame(files.image2, device), pad="bottom"
            )
        place = out / "flow" / files.image1.name
        write_kitti(place, flows[-1][0])
        yield f"{place}: {stats.nfe} evaluations"


def _frame(path: Path, device: torch.device) -> Tensor:
    return read_image(path)[None].to(device)
