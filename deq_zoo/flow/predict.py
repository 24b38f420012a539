"""Flow of files: pairs and sequences of pictures, videos, and the test sets of benchmarks."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

from PIL import Image
from torch import Tensor

from deq_zoo.errors import ZooError
from deq_zoo.flow.budget import budget_note
from deq_zoo.flow.colours import flow_to_colour
from deq_zoo.flow.datasets import Files, kitti, sintel
from deq_zoo.flow.formats import flo_bytes, kitti_bytes
from deq_zoo.flow.model import SETTLED, DEQFlow, FlowPrediction, Side
from deq_zoo.flow.video import FlowStream, Frame, read_frames
from deq_zoo.images.inputs import as_image
from deq_zoo.predictions import Failure, OutFolder, Prediction, Results

_EXACT = 0.1  # pixels: the tolerance for results that a benchmark compares
PICTURES = (".png", ".jpg", ".jpeg", ".ppm", ".pgm", ".bmp", ".tif", ".tiff", ".webp")


def predict_files(model: DEQFlow, files: Sequence[Path], out: OutFolder) -> Results:
    """Yield the flows of two pictures, a sequence of them, videos, or the folder of a benchmark.

    A picture that cannot be read fails the pairs that it belongs to, a video only itself.
    """
    if len(files) == 1 and files[0].is_dir():
        yield from write_submission(model, files[0], out)
    elif all(file.suffix.lower() in PICTURES for file in files):
        if len(files) < 2:
            raise ZooError("flow needs two pictures, or a video: name the next frame as well")
        yield from _predict_pictures(model, files, out)
    elif any(file.suffix.lower() in PICTURES or file.is_dir() for file in files):
        raise ZooError("give pictures, or videos, or one folder: not several kinds at once")
    else:
        out.check(f"{file.stem}_00000.flo" for file in files)
        for file in files:
            yield from _predict_video(model, file, out)


def write_submission(model: DEQFlow, root: Path, out: OutFolder) -> Results:
    """Yield the flows of the test set of Sintel (`test`) or KITTI (`testing`), for its server."""
    if (root / "testing").is_dir():
        yield from _write_kitti(model, root, out)
    elif (root / "test").is_dir():
        yield from _write_sintel(model, root, out)
    else:
        raise ZooError(
            f"{root} is neither Sintel, with a folder test, nor KITTI 2015, with a folder testing"
        )


def _predict_pictures(model: DEQFlow, files: Sequence[Path], out: OutFolder) -> Results:
    """Yield the flow from each picture to the next; files are named after the first of a pair."""
    _check_names(files, out)
    if len(files) == 2:
        results: Iterable[_Result | str] = [_predict_pair(model, files[0], files[1])]
    else:
        results = _predict_sequence(FlowStream(model), files)
    for pair, result in zip(pairwise(files), results, strict=True):
        yield _finish(pair, result, partial(_write_flow, out, pair[0].stem))


def _predict_video(model: DEQFlow, file: Path, out: OutFolder) -> Results:
    """Yield the flows of a video; files are numbered by the first frame of each pair."""
    stream, pairs = FlowStream(model), 0
    try:
        for k, pixels in enumerate(read_frames(file)):
            frame = stream.push(pixels.to(model.device))
            if frame is not None:
                pairs, name = pairs + 1, f"{file.stem}_{k - 1:05d}"
                files = _write_flow(out, name, frame.flow[0])
                yield _describe(str(file), _Result.of_frame(frame, model), files)
    except (ZooError, OSError) as error:
        yield Failure(str(file), str(error))
        return
    if not pairs:
        yield Failure(str(file), "it has no two frames of one size, and flow needs a pair")


def _write_sintel(model: DEQFlow, root: Path, out: OutFolder) -> Results:
    sets = {rendering: sintel(root, "test", rendering) for rendering in ("clean", "final")}
    out.check(_sintel_name(key, pair) for key, pairs in sets.items() for pair in pairs.files)
    for rendering, pairs in sets.items():
        for _, group in groupby(pairs.files, lambda pair: pair.scene):
            scene = list(group)
            frames = [scene[0].image1, *(pair.image2 for pair in scene)]
            results = _predict_sequence(FlowStream(model, tolerance=_EXACT), frames)
            for pair, result in zip(scene, results, strict=True):
                write = partial(_write_one, out, _sintel_name(rendering, pair), flo_bytes)
                yield _finish((pair.image1, pair.image2), result, write)


def _sintel_name(rendering: str, pair: Files) -> str:
    return f"{rendering}/{pair.scene}/{pair.image1.stem}.flo"


def _write_kitti(model: DEQFlow, root: Path, out: OutFolder) -> Results:
    pairs = kitti(root, "testing").files
    out.check(f"flow/{pair.image1.name}" for pair in pairs)
    for pair in pairs:
        result = _predict_pair(model, pair.image1, pair.image2, pad="bottom")
        write = partial(_write_one, out, f"flow/{pair.image1.name}", kitti_bytes)
        yield _finish((pair.image1, pair.image2), result, write)


class _Result(NamedTuple):
    """A flow (2, H, W) and how the model computed it; see `Frame` and `budget_note`."""

    flow: Tensor
    nfe: int
    change: float
    reused: bool
    budget: str

    @classmethod
    def of_pair(cls, out: FlowPrediction, model: DEQFlow) -> _Result:
        assert out.stats is not None
        note = budget_note(model.deq.config)
        return cls(out.prediction, out.stats.nfe, out.change, False, note)

    @classmethod
    def of_frame(cls, frame: Frame, model: DEQFlow) -> _Result:
        note = budget_note(model.deq.config)
        return cls(frame.flow[0].float().cpu(), frame.nfe, frame.change, frame.reused, note)


def _predict_pair(model: DEQFlow, first: Path, second: Path, pad: Side = "both") -> _Result | str:
    """Return the flow from one picture to another, or why there is none."""
    try:
        return _Result.of_pair(model.predict((first, second), pad=pad), model)
    except (ZooError, OSError) as error:
        return str(error)


def _predict_sequence(stream: FlowStream, files: Sequence[Path]) -> Iterator[_Result | str]:
    """Yield the flow from each picture to the next, or why there is none; read each file once."""
    size, trouble = "", ""
    for k, file in enumerate(files):
        before, trouble = (size, trouble), ""
        frame = None
        try:
            pixels = as_image(file)
            size = " x ".join(map(str, pixels.shape[1:]))
            frame = stream.push(pixels[None].to(stream.model.device))
        except (ZooError, OSError) as error:
            stream.reset()
            trouble = str(error)
        if frame is not None:
            yield _Result.of_frame(frame, stream.model)
        elif k:
            differ = f"both pictures must have one size, got {before[0]} and {size}"
            yield before[1] or trouble or differ


def _finish(
    pair: tuple[Path, Path], result: _Result | str, write: Callable[[Tensor], tuple[Path, ...]]
) -> Prediction | Failure:
    """Write the flow of a pair and describe it, or say why there is none."""
    source = f"{pair[0]}, {pair[1]}"
    if isinstance(result, str):
        return Failure(source, result)
    try:
        return _describe(source, result, write(result.flow))
    except (ZooError, OSError) as error:
        return Failure(source, str(error))


def _describe(source: str, result: _Result, files: tuple[Path, ...]) -> Prediction:
    settled = result.change <= SETTLED  # False for NaN
    motion = float(result.flow.square().sum(0).sqrt().mean())
    notes = [f"{result.nfe} evaluation{'' if result.nfe == 1 else 's'}"]
    if result.budget:
        notes.append(result.budget)
    if result.reused:
        notes.append("from the state of the pair before")
    if not settled:
        notes.append(
            f"warning: the flow did not settle, an evaluation changes it by {result.change:.1f} px"
        )
    text = f"{files[0]}: mean motion {motion:.2f} px ({'; '.join(notes)})"
    data = {
        "mean_motion_px": motion,
        "evaluations": result.nfe,
        "change_px": result.change,
        "settled": settled,
        "reused": result.reused,
    }
    return Prediction(source, text, data, files)


def _flow_names(name: str) -> tuple[str, str]:
    return f"{name}.flo", f"{name}_flow.png"


def _write_flow(out: OutFolder, name: str, flow: Tensor) -> tuple[Path, ...]:
    """Write a flow in Middlebury's format and in colours."""
    flow = flow.float().cpu()
    buffer = io.BytesIO()
    Image.fromarray(flow_to_colour(flow).permute(1, 2, 0).numpy()).save(buffer, "PNG")
    contents = (flo_bytes(flow), buffer.getvalue())
    names = _flow_names(name)
    return tuple(out.write(file, each) for file, each in zip(names, contents, strict=True))


def _write_one(
    out: OutFolder, name: str, encode: Callable[[Tensor], bytes], flow: Tensor
) -> tuple[Path, ...]:
    return (out.write(name, encode(flow)),)


def _check_names(files: Sequence[Path], out: OutFolder) -> None:
    """Raise if flows would replace one another, a file of another run, or a picture to read."""
    names = [name for file in files[:-1] for name in _flow_names(file.stem)]
    written = {(out.path / name).resolve() for name in names}
    lost = [file for file in files if file.resolve() in written]
    if lost:
        raise ZooError(f"{lost[0]} would be overwritten: choose another --out")
    out.check(names)
