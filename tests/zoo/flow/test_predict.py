"""Flow of files: what is written where, what is refused, and what comes at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from deq_zoo.errors import ZooError
from deq_zoo.flow import DEQFlow, FlowConfig
from deq_zoo.flow.formats import read_flo, write_image
from deq_zoo.flow.predict import predict_files, write_submission
from deq_zoo.preset import find_preset
from tests.zoo.flow.test_data import write_all_sets

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> DEQFlow:
    torch.manual_seed(0)
    plain = {"f_solver": "simple_fixed_point_iter", "f_max_iter": 2}
    return DEQFlow(FlowConfig(size="nano"), plain).eval()


def write_picture(path: Path, size: tuple[int, int] = (64, 64)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_image(path, torch.randint(256, (3, *size), dtype=torch.uint8))
    return path


def write_film(path: Path, frames: int) -> Path:
    av = pytest.importorskip("av")
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=5)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for _ in range(frames):
            frame = Image.effect_noise((64, 64), 50).convert("RGB")
            file.mux(stream.encode(av.VideoFrame.from_image(frame)))
        file.mux(stream.encode())
    return path


def test_results_never_replace_one_another(model: DEQFlow, tmp_path: Path) -> None:
    files = [write_picture(tmp_path / name) for name in ("a/0.png", "b/0.png", "c/1.png")]
    with pytest.raises(ZooError, match="several files are called 0"):
        list(predict_files(model, files, tmp_path / "out", CPU))
    films = [write_film(tmp_path / each / "x.mp4", 2) for each in "ab"]
    with pytest.raises(ZooError, match="several files are called x"):
        list(predict_files(model, films, tmp_path / "out", CPU))
    assert not (tmp_path / "out").exists()
    pair = [files[0], files[1]]  # only the first frame gives its name
    assert len(list(predict_files(model, pair, tmp_path / "out", CPU))) == 1


def test_results_never_replace_what_is_read(model: DEQFlow, tmp_path: Path) -> None:
    files = [write_picture(tmp_path / name) for name in ("a.png", "a_flow.png")]
    before = files[1].read_bytes()
    with pytest.raises(ZooError, match=r"a_flow.png would be overwritten: choose another --out"):
        list(predict_files(model, files, tmp_path, CPU))
    assert files[1].read_bytes() == before


def test_a_video_without_a_pair_is_an_error(model: DEQFlow, tmp_path: Path) -> None:
    with pytest.raises(ZooError, match="no two frames"):
        list(predict_files(model, [write_film(tmp_path / "one.mp4", 1)], tmp_path, CPU))


def test_pictures_of_another_size_are_named(model: DEQFlow, tmp_path: Path) -> None:
    files = [write_picture(tmp_path / "a.png"), write_picture(tmp_path / "b.png", (60, 64))]
    with pytest.raises(ZooError, match=r"\(64, 64\) of .*a.png and \(60, 64\) of .*b.png"):
        list(predict_files(model, files, tmp_path, CPU))


def test_lines_come_as_flows_are_written(model: DEQFlow, tmp_path: Path) -> None:
    files = [write_picture(tmp_path / f"{k}.png") for k in range(3)]
    task: Any = find_preset("flow-smoke").task
    lines = iter(task.predict(model, files, tmp_path / "out", CPU))
    assert "0.flo" in next(lines)
    assert (tmp_path / "out" / "0.flo").exists()
    assert not (tmp_path / "out" / "1.flo").exists()
    assert len(list(lines)) == 1
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == ["0.flo", "0_flow.png", "1.flo", "1_flow.png"]  # no temporary ones


def test_grey_pictures_make_a_pair(model: DEQFlow, tmp_path: Path) -> None:
    files = [tmp_path / "a.pgm", tmp_path / "b.pgm"]
    for file in files:
        Image.effect_noise((64, 70), 50).save(file)
    list(predict_files(model, files, tmp_path, CPU))
    assert read_flo(tmp_path / "a.flo").shape == (2, 70, 64)


@pytest.mark.parametrize(
    ("folder", "frame"),
    [("Sintel", "test/clean/cave/frame_0002.png"), ("KITTI", "testing/image_2/000000_11.png")],
)
def test_a_test_set_with_a_frame_of_another_size_is_an_error(
    model: DEQFlow, tmp_path: Path, folder: str, frame: str
) -> None:
    root = write_all_sets(tmp_path) / folder
    write_picture(root / frame)
    with pytest.raises(ZooError, match=Path(frame).name):
        list(write_submission(model, root, tmp_path / "out", CPU))
