"""Presets, training, prediction and conversion, from the command line where users are."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import deq_zoo
from deq_zoo.cli import main
from deq_zoo.errors import CheckpointError, DataError, ZooError
from deq_zoo.flow import DEQFlow
from deq_zoo.flow.convert import from_authors, to_authors
from deq_zoo.flow.formats import read_flo, read_image, write_image
from deq_zoo.flow.model import State
from deq_zoo.flow.predict import predict_files, write_submission
from deq_zoo.flow.presets import DENSE, SPARSE
from deq_zoo.flow.task import StageTask, WarpTask
from deq_zoo.flow.warps import synthetic_video
from deq_zoo.preset import PRESETS, find_preset, load_presets
from deq_zoo.task import Shard
from deq_zoo.values import from_data, to_data
from tests.zoo.flow.test_data import write_all_sets

CPU = torch.device("cpu")
load_presets("flow")
NAMES = [name for name in PRESETS if name.startswith("flow-")]


@pytest.mark.parametrize("name", NAMES)
def test_presets_are_values_that_build(name: str) -> None:
    preset = find_preset(name)
    assert from_data(json.loads(json.dumps(to_data(preset)))) == preset
    with torch.device("meta"):
        preset.task.build()


def test_the_papers_presets() -> None:
    chairs, things = find_preset("flow-chairs-b"), find_preset("flow-things-h")
    assert isinstance(chairs.task, StageTask)
    assert isinstance(things.task, StageTask)
    assert (chairs.steps, chairs.clip, chairs.optim.lr, chairs.seed) == (120_000, 1.0, 4e-4, 1234)
    assert (chairs.task.batch, chairs.task.crop) == (12, (368, 496))
    assert (things.task.batch, things.task.crop, things.optim.lr) == (6, (400, 720), 1.25e-4)
    assert things.task.net.all_grad
    assert things.task.net.freeze_bn
    assert not chairs.task.net.freeze_bn
    assert (DENSE.f_max_iter, DENSE.n_states, DENSE.grad) == (36, 6, [1])
    assert (SPARSE.f_max_iter, SPARSE.n_states, SPARSE.grad) == (40, 2, [3])
    assert things.target is not None
    assert things.target.value == 1.28


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("flow") / "run"
    assert main(["train", "flow-smoke", "--cpu", "--quiet", "--out", str(out)]) == 0
    return out


def test_the_smoke_preset_trains_and_reports(smoke: Path) -> None:
    assert "flows" in (smoke / "report.html").read_text()
    with Image.open(smoke / "pictures" / "flows.png") as picture:
        assert picture.width > 400
    lines = [json.loads(line) for line in (smoke / "log.jsonl").read_text().splitlines()]
    (metrics,) = (line["metrics"] for line in lines if line["kind"] == "eval")
    assert metrics["aepe"] == metrics["warps_aepe"]


@pytest.fixture
def frames(tmp_path: Path) -> list[Path]:
    files = []
    for k, frame in enumerate(synthetic_video(3, (66, 70))[0]):
        files.append(tmp_path / f"frame{k}.png")
        write_image(files[-1], frame)
    return files


def test_predicts_flow_of_two_pictures(
    smoke: Path, frames: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    files = [str(f) for f in frames[:2]]
    assert main(["predict", str(smoke), *files, "--out", str(out), "--cpu"]) == 0
    assert "4 evaluations" in capsys.readouterr().out
    assert read_flo(out / "frame0.flo").shape == (2, 66, 70)
    assert read_image(out / "frame0_flow.png").shape == (3, 66, 70)
    assert sorted(p.name for p in out.iterdir()) == ["frame0.flo", "frame0_flow.png"]


def test_a_sequence_and_a_video_are_streamed(
    smoke: Path, frames: list[Path], tmp_path: Path
) -> None:
    av = pytest.importorskip("av")
    model: Any = deq_zoo.load(smoke)
    lines = list(predict_files(model, frames, tmp_path / "a", CPU))
    assert len(lines) == 2
    assert "from the last pair's state" in lines[1]
    with av.open(str(tmp_path / "film.mp4"), "w") as film:
        stream = film.add_stream("mpeg4", rate=5)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for file in frames:
            picture = av.VideoFrame.from_image(Image.open(file).crop((0, 0, 64, 64)))
            film.mux(stream.encode(picture))
        film.mux(stream.encode())
    lines = list(predict_files(model, [tmp_path / "film.mp4"], tmp_path / "b", CPU))
    assert len(lines) == 2
    assert (tmp_path / "b" / "film_00001.flo").exists()


def test_test_sets_are_written_for_their_servers(smoke: Path, tmp_path: Path) -> None:
    pytest.importorskip("av")
    root, model = write_all_sets(tmp_path), deq_zoo.load(smoke)
    assert isinstance(model, DEQFlow)
    lines = list(write_submission(model, root / "Sintel", tmp_path / "s", CPU))
    assert len(lines) == 8
    assert read_flo(tmp_path / "s/final/cave/frame_0002.flo").shape == (2, 80, 96)
    lines = list(write_submission(model, root / "KITTI", tmp_path / "k", CPU))
    assert sorted(p.name for p in (tmp_path / "k/flow").iterdir()) == [
        "000000_10.png", "000001_10.png"
    ]  # fmt: skip
    with pytest.raises(ZooError, match="neither Sintel"):
        list(write_submission(model, tmp_path / "s", tmp_path / "x", CPU))


def test_files_that_make_no_pair_are_errors(
    smoke: Path, frames: list[Path], tmp_path: Path
) -> None:
    model: Any = deq_zoo.load(smoke)
    with pytest.raises(ZooError, match="two pictures"):
        list(predict_files(model, frames[:1], tmp_path, CPU))
    with pytest.raises(ZooError, match="several kinds"):
        list(predict_files(model, [frames[0], tmp_path / "x.mp4"], tmp_path, CPU))
    Image.new("RGB", (20, 20)).save(tmp_path / "small.png")
    with pytest.raises(ZooError, match="one size"):
        list(predict_files(model, [frames[0], tmp_path / "small.png"], tmp_path, CPU))


def test_a_stage_trains_on_files_and_is_evaluated_on_files(tmp_path: Path) -> None:
    pytest.importorskip("av")
    smoke = find_preset("flow-smoke").task
    assert isinstance(smoke, WarpTask)
    task = StageTask(
        net=smoke.net, deq=smoke.deq, batch=2, crop=(64, 72), stage="kitti",
        validate=("kitti", "sintel_final"), data_dir=str(write_all_sets(tmp_path)),
    )  # fmt: skip
    assert task.steps_per_epoch == 1
    model = task.build()
    batch = task.train_batch(0, 0, Shard())
    loss = task.loss(model.train(), batch, None)
    assert loss.value.isfinite()
    with torch.no_grad():
        result = task.evaluate(model.eval(), CPU, thorough=False)
    assert set(result.metrics) == {
        "aepe", "kitti_aepe", "kitti_f1", "sintel_final_aepe",
        "sintel_final_1px", "sintel_final_3px", "sintel_final_5px",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["flow-smoke", "flow-kitti-b"])
def test_training_batches_depend_on_step_seed_and_shard_alone(name: str, tmp_path: Path) -> None:
    pytest.importorskip("av")
    task: Any = replace(find_preset(name).task, crop=(64, 72), batch=2)  # type: ignore[type-var]
    if isinstance(task, StageTask):
        task = replace(task, data_dir=str(write_all_sets(tmp_path)))
    first, again, later = (task.train_batch(k, 0, Shard()) for k in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], later[0])
    halves = [task.train_batch(3, 0, Shard(rank, 2)) for rank in range(2)]
    for whole, *parts in zip(first, *halves, strict=True):
        assert torch.equal(whole, torch.cat(parts))


def test_missing_data_is_an_error_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["train", "flow-chairs-b", "--out", str(out)]) == 2
    assert "--data-dir FOLDER" in capsys.readouterr().err
    assert not out.exists()
    task: Any = replace(find_preset("flow-things-b").task, data_dir=str(tmp_path))  # type: ignore[type-var]
    with pytest.raises(DataError, match="there is no Sintel in"):
        assert task.steps_per_epoch
    for wrong, message in (
        ({"validate": ("chair",)}, "did you mean 'chairs'"),
        ({"validate": ()}, "needs a set"),
        ({"crop": (60, 64)}, "multiples of 8"),
        ({"batch": 0}, "at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            StageTask(**wrong)


def test_a_later_stage_starts_from_an_earlier_run(smoke: Path) -> None:
    task = find_preset("flow-smoke").task
    later: Any = replace(task, start_from=str(smoke))  # type: ignore[type-var]
    model, earlier = later.build(), deq_zoo.load(smoke)
    later.begin(model)
    for key, value in earlier.state_dict().items():
        assert torch.equal(model.state_dict()[key], value)


def test_a_run_needs_the_one_it_started_from_no_more(
    smoke: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, then = tmp_path / "first", tmp_path / "then"
    shutil.copytree(smoke, first)
    args = ["train", "flow-smoke", "--cpu", "--quiet", "--no-report", "--out", str(then)]
    assert main([*args, "--set", f"start_from={first}", "--max-seconds", "0"]) == 0
    shutil.rmtree(first)
    assert main([*args, "--resume"]) == 0
    deq_zoo.load(then)
    assert main([*args, "--force", "--set", f"start_from={first}"]) == 2
    assert "no run folder or checkpoint" in capsys.readouterr().err
    assert (then / "last.safetensors").exists()  # the error comes before the folder is replaced


def test_settings_that_would_do_nothing_are_refused(tmp_path: Path) -> None:
    assert main(["info", "flow-smoke", "--data-dir", str(tmp_path)]) == 2
    with pytest.raises(ValueError, match="eval_pairs must be at least 1"):
        WarpTask(eval_pairs=0)
    with pytest.raises(ValueError, match=r"noise must lie in \[0, 255\]"):
        WarpTask(noise=-1.0)


def test_batches_that_are_too_small_are_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("av")
    with pytest.raises(ZooError, match="a batch of 2 is too small for 3 processes"):
        find_preset("flow-smoke").task.train_batch(0, 0, Shard(2, 3))
    root, out = write_all_sets(tmp_path), tmp_path / "run"
    args = ["--data-dir", str(root), "--out", str(out), "--cpu", "--set", "size=nano"]
    assert main(["train", "flow-kitti-b", *args]) == 2
    assert "needs as many pairs, there are 2" in capsys.readouterr().err
    assert not out.exists()


def test_noise_has_one_strength_for_both_frames() -> None:
    task: Any = replace(find_preset("flow-smoke").task, batch=4)  # type: ignore[type-var]
    noisy = replace(task, noise=5.0)
    clean, batch = task.train_batch(0, 0, Shard()), noisy.train_batch(0, 0, Shard())
    strength = []
    for before, after in zip(clean[:2], batch[:2], strict=True):
        assert after.dtype == torch.float32
        assert 0 <= float(after.min()) <= float(after.max()) <= 255
        strength.append((after - before).std(dim=(1, 2, 3)))
    assert (strength[0] < 5.1).all()
    assert strength[0].unique().numel() == 4
    torch.testing.assert_close(strength[0], strength[1], rtol=0.05, atol=0.05)
    assert all(torch.equal(a, b) for a, b in zip(clean[2:], batch[2:], strict=True))
    again = noisy.train_batch(0, 0, Shard(1, 2))
    assert torch.equal(again[0], batch[0][1::2])


def test_released_weights_go_round(smoke: Path, tmp_path: Path) -> None:
    model = deq_zoo.load(smoke)
    written = to_authors(model.state_dict())
    assert "module.cnet.layer2.0.downsample.1.weight" in written
    torch.save(written, tmp_path / "net.pth")
    assert main(["convert", str(tmp_path / "net.pth"), "--preset", "flow-smoke"]) == 0
    again = deq_zoo.load(tmp_path / "net.safetensors")
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value)
    bare = to_authors(model.state_dict(), data_parallel=False)
    only_twin = {k: v for k, v in bare.items() if ".norm3." not in k}
    assert from_authors(only_twin).keys() == model.state_dict().keys()
    bare["cnet.layer2.0.downsample.1.weight"] += 1
    with pytest.raises(CheckpointError, match="one tensor in the authors' files"):
        from_authors(bare)


def test_some_solves_of_training_start_near_the_true_flow() -> None:
    task = replace(find_preset("flow-smoke").task, batch=40, near=0.5, near_error=2.0)  # type: ignore[type-var]
    batch = task.train_batch(3, 0, Shard())
    truth, start = batch[2], batch[4]
    assert start.shape == (40, 2, 8, 9)
    assert all(map(torch.equal, batch, task.train_batch(3, 0, Shard())))
    halves = [task.train_batch(3, 0, Shard(rank, 2))[4] for rank in range(2)]
    assert torch.equal(torch.stack(halves, dim=1).flatten(0, 1), start)
    moved = start.flatten(1).any(1)
    assert 10 < int(moved.sum()) < 30
    errors = 8 * start - F.avg_pool2d(truth, 8)
    assert 1.5 < float(errors[moved].std()) < 3.0
    with pytest.raises(ValueError, match="share of pairs"):
        replace(task, near=1.5)  # type: ignore[type-var]


def test_a_solve_may_start_from_a_flow_alone() -> None:
    model = find_preset("flow-smoke").task.build().eval()
    a, b = torch.randint(256, (2, 1, 3, 64, 64), dtype=torch.uint8)
    assert isinstance(model, DEQFlow)
    flow = torch.randn(1, 2, 8, 8)
    result = model(a, b, flow, f_max_iter=2)
    wanted = model(a, b, State(torch.zeros(1, 32, 8, 8), flow), f_max_iter=2)
    assert torch.equal(result.flows[0], wanted.flows[0])
    with pytest.raises(ValueError, match="a start for these images"):
        model(a, b, torch.randn(1, 2, 4, 8))
