"""Prediction in Python and of files: what is returned, written, refused and warned about."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from deq_zoo.errors import DataError, ZooError
from deq_zoo.flow import DEQFlow, FlowConfig, State
from deq_zoo.flow.formats import read_flo, read_kitti
from deq_zoo.flow.layers import UpdateBlock
from deq_zoo.flow.predict import predict_files, write_submission
from deq_zoo.images.files import read_image
from deq_zoo.predictions import Failure, OutFolder, Prediction
from deq_zoo.preset import find_preset
from tests.zoo.flow import inputs
from tests.zoo.flow.test_data import write_all_sets


@pytest.fixture(scope="module")
def model() -> DEQFlow:
    torch.manual_seed(0)
    plain = {"f_solver": "simple_fixed_point_iter", "f_max_iter": 2}
    return DEQFlow(FlowConfig(size="nano"), plain).eval()


def write_picture(path: Path, size: tuple[int, int] = (64, 64)) -> Path:
    return inputs.write_picture(path, torch.randint(256, (3, *size), dtype=torch.uint8))


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


def predict(model: DEQFlow, files: list[Path], out: Path, force: bool = False) -> list[Any]:
    return list(predict_files(model, files, OutFolder(out, force)))


def test_python_predicts_the_flow_of_paths_images_arrays_and_tensors(
    model: DEQFlow, tmp_path: Path
) -> None:
    files = inputs.write_frames(tmp_path, 2, (66, 70))
    pixels = [read_image(file) for file in files]
    batch = tuple(each[None] for each in pixels)
    with torch.no_grad():
        expected = model(batch).prediction[0]
    pairs: list[Any] = [
        (files[0], str(files[1])),
        (Image.open(files[0]), pixels[1]),
        (pixels[0].permute(1, 2, 0).numpy(), pixels[1] / 255),
        torch.stack(pixels),
    ]
    for pair in pairs:
        out = model.predict(pair)
        assert out.prediction.shape == (2, 66, 70)
        assert_close(out.prediction, expected)
        assert out.stats is not None
        assert out.stats.nfe == 2


def test_a_prediction_continues_from_the_state_of_another(model: DEQFlow) -> None:
    pair = inputs.python_input()
    half = model.predict(pair, f_max_iter=1)
    assert isinstance(half.state, State)
    rest = model.predict(pair, half.state, f_max_iter=1)
    assert_close(rest.prediction, model.predict(pair).prediction)


def test_a_prediction_says_how_much_the_flow_still_changes(model: DEQFlow) -> None:
    pair = inputs.python_input()
    with torch.no_grad():
        z = [model.predict(pair, f_max_iter=n).state.flow for n in (2, 3)]
    change = 8 * (z[1] - z[0]).square().sum(1).mean().sqrt()
    out = model.predict(pair)
    assert_close(out.change, float(change), rtol=1e-3, atol=1e-4)
    assert out.settled == (out.change <= 0.5)


def test_what_is_no_pair_is_an_error(model: DEQFlow) -> None:
    image = torch.zeros(3, 64, 64, dtype=torch.uint8)
    for wrong in ("a.png", image, (image,), 5):
        with pytest.raises(TypeError, match=r"give a pair \(image1, image2\)"):
            model.predict(wrong)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"one size, got \(64, 64\) and \(60, 64\)"):
        model.predict((image, image[:, :60]))


class Restless(UpdateBlock):
    """An f under which the flow never settles: it grows by a place of the grid each time."""

    def forward(self, hid: Any, flow: Any, given: Any) -> Any:
        return hid, flow + 1


def test_a_solve_that_does_not_settle_is_warned_about(model: DEQFlow, tmp_path: Path) -> None:
    files = inputs.write_frames(tmp_path)
    restless = DEQFlow(model.config, {"f_solver": "simple_fixed_point_iter", "f_max_iter": 2})
    restless.update_block.__class__ = Restless
    for chosen in (files[:2], files):  # a pair, and a sequence
        for result in predict(restless.eval(), chosen, tmp_path / f"out{len(chosen)}"):
            assert "warning: the flow did not settle" in result.text
            assert "changes it by 11.3 px" in result.text  # 8 pixels along both axes
            assert result.data["settled"] is False
    still = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in still.update_block.flow_head.parameters():
            parameter.mul_(0)
    (result,) = predict(still, files[:2], tmp_path / "still")
    assert "warning" not in result.text
    assert result.data["settled"] is True


def test_results_never_replace_one_another(model: DEQFlow, tmp_path: Path) -> None:
    files = [write_picture(tmp_path / name) for name in ("a/0.png", "b/0.png", "c/1.png")]
    with pytest.raises(ZooError, match=r"two results would be written to .*0\.flo"):
        predict(model, files, tmp_path / "out")
    films = [write_film(tmp_path / each / "x.mp4", 2) for each in "ab"]
    with pytest.raises(ZooError, match=r"two results would be written to .*x_00000\.flo"):
        predict(model, films, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    pair = [files[0], files[1]]  # only the first frame gives its name
    assert len(predict(model, pair, tmp_path / "out")) == 1


def test_results_of_an_earlier_command_stay_without_force(model: DEQFlow, tmp_path: Path) -> None:
    files = inputs.write_frames(tmp_path)
    predict(model, files, tmp_path / "out")
    before = (tmp_path / "out" / "frame1.flo").stat().st_mtime_ns
    with pytest.raises(ZooError, match=r"frame0.flo exists already.*--force"):
        predict(model, files, tmp_path / "out")
    assert (tmp_path / "out" / "frame1.flo").stat().st_mtime_ns == before
    assert len(predict(model, files, tmp_path / "out", force=True)) == 2


def test_results_never_replace_a_picture_to_read(model: DEQFlow, tmp_path: Path) -> None:
    files = [write_picture(tmp_path / name) for name in ("a.png", "a_flow.png")]
    before = files[1].read_bytes()
    with pytest.raises(ZooError, match=r"a_flow.png would be overwritten: choose another --out"):
        predict(model, files, tmp_path, force=True)
    assert files[1].read_bytes() == before


def test_a_broken_picture_fails_its_pairs_only(model: DEQFlow, tmp_path: Path) -> None:
    files = inputs.write_frames(tmp_path, 5)
    files[2].write_bytes(b"no picture")
    results = predict(model, files, tmp_path / "out")
    assert [type(each) for each in results] == [Prediction, Failure, Failure, Prediction]
    assert all("frame2.png" in each.reason for each in results[1:3])
    assert results[1].source == f"{files[1]}, {files[2]}"
    assert not results[3].data["reused"]  # there is no state of the pair before
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == ["frame0.flo", "frame0_flow.png", "frame3.flo", "frame3_flow.png"]


def test_a_pair_that_cannot_be_read_is_a_failure(model: DEQFlow, tmp_path: Path) -> None:
    good, broken = inputs.predict_inputs(tmp_path)
    (result,) = predict(model, [good[0], *broken], tmp_path / "out")
    assert isinstance(result, Failure)
    assert "broken.png" in result.reason


def test_a_broken_video_fails_alone(model: DEQFlow, tmp_path: Path) -> None:
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"no video")
    films = [broken, write_film(tmp_path / "one.mp4", 1), write_film(tmp_path / "two.mp4", 2)]
    results = predict(model, films, tmp_path / "out")
    assert [type(each) for each in results] == [Failure, Failure, Prediction]
    assert "no two frames" in results[1].reason
    assert (tmp_path / "out" / "two_00000.flo").exists()


def test_pictures_of_another_size_fail_their_pairs(model: DEQFlow, tmp_path: Path) -> None:
    files = [write_picture(tmp_path / "a.png"), write_picture(tmp_path / "b.png", (60, 64))]
    (pair,) = predict(model, files, tmp_path / "pair")
    assert "got (64, 64) and (60, 64)" in pair.reason
    files += [write_picture(tmp_path / name, (60, 64)) for name in ("c.png", "d.png")]
    first, *others = predict(model, files, tmp_path / "sequence")
    assert "got 64 x 64 and 60 x 64" in first.reason
    assert [type(each) for each in others] == [Prediction, Prediction]


def test_every_picture_is_read_once(
    model: DEQFlow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []

    def read(path: Path) -> torch.Tensor:
        reads.append(path.name)
        return read_image(path)

    monkeypatch.setattr("deq_zoo.images.inputs.read_image", read)
    files = inputs.write_frames(tmp_path)
    predict(model, files[:2], tmp_path / "pair")
    predict(model, files, tmp_path / "sequence")
    assert reads == ["frame0.png", "frame1.png", "frame0.png", "frame1.png", "frame2.png"]


def test_results_come_as_flows_are_written(model: DEQFlow, tmp_path: Path) -> None:
    files = inputs.write_frames(tmp_path)
    out = tmp_path / "out"
    results = iter(find_preset("flow-smoke").task.predict(model, files, OutFolder(out)))
    first = next(results)
    assert isinstance(first, Prediction)
    assert first.files == (out / "frame0.flo", out / "frame0_flow.png")
    assert first.files[0].exists()
    assert not (out / "frame1.flo").exists()
    (second,) = results
    assert isinstance(second, Prediction)
    assert "from the state of the pair before" in second.text
    assert read_flo(second.files[0]).shape == (2, 66, 70)


def test_grey_pictures_make_a_pair(model: DEQFlow, tmp_path: Path) -> None:
    files = [tmp_path / "a.pgm", tmp_path / "b.pgm"]
    for file in files:
        Image.effect_noise((64, 70), 50).save(file)
    predict(model, files, tmp_path)
    assert read_flo(tmp_path / "a.flo").shape == (2, 70, 64)


def test_inputs_that_make_no_pair_are_errors(model: DEQFlow, tmp_path: Path) -> None:
    files = inputs.write_frames(tmp_path, 2)
    with pytest.raises(ZooError, match="two pictures"):
        predict(model, files[:1], tmp_path / "out")
    with pytest.raises(ZooError, match="several kinds"):
        predict(model, [files[0], tmp_path / "x.mp4"], tmp_path / "out")


def test_test_sets_are_written_for_their_servers(model: DEQFlow, tmp_path: Path) -> None:
    pytest.importorskip("av")
    root = write_all_sets(tmp_path)
    results = list(write_submission(model, root / "Sintel", OutFolder(tmp_path / "s")))
    assert [type(each) for each in results] == [Prediction] * 8
    assert read_flo(tmp_path / "s/final/cave/frame_0002.flo").shape == (2, 80, 96)
    with pytest.raises(ZooError, match="exists already"):
        list(write_submission(model, root / "Sintel", OutFolder(tmp_path / "s")))
    list(write_submission(model, root / "KITTI", OutFolder(tmp_path / "k")))
    names = sorted(path.name for path in (tmp_path / "k/flow").iterdir())
    assert names == ["000000_10.png", "000001_10.png"]
    assert read_kitti(tmp_path / "k/flow" / names[0])[0].shape == (2, 80, 96)
    with pytest.raises(ZooError, match="neither Sintel"):
        list(write_submission(model, tmp_path / "s", OutFolder(tmp_path / "x")))


@pytest.mark.parametrize(
    ("folder", "frame", "failures"),
    [
        ("Sintel", "test/clean/cave/frame_0002.png", 2),
        ("KITTI", "testing/image_2/000000_11.png", 1),
    ],
)
def test_a_frame_of_another_size_fails_its_pairs_of_a_test_set(
    model: DEQFlow, tmp_path: Path, folder: str, frame: str, failures: int
) -> None:
    pytest.importorskip("av")
    root = write_all_sets(tmp_path) / folder
    write_picture(root / frame)
    results = list(write_submission(model, root, OutFolder(tmp_path / "out")))
    failed = [each for each in results if isinstance(each, Failure)]
    assert len(failed) == failures
    assert len(results) > failures
    assert all(Path(frame).name in each.source for each in failed)
