"""Data of the tasks: batches of training, splits, scores and examples."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from deq_zoo.cli import main
from deq_zoo.errors import DataError, ZooError
from deq_zoo.evaluate import evaluate
from deq_zoo.flow import DEQFlow
from deq_zoo.flow.datasets import FlowSet
from deq_zoo.flow.pictures import draw_examples
from deq_zoo.flow.task import StageTask, WarpTask
from deq_zoo.preset import find_preset
from deq_zoo.task import Shard, Split
from deq_zoo.values import from_data, to_data
from tests.zoo.flow.test_data import write_all_sets

SPLITS: tuple[Split, ...] = ("val", "test")


@pytest.fixture(scope="module")
def model() -> DEQFlow:
    torch.manual_seed(0)
    return smoke_task().build().eval()


def smoke_task() -> WarpTask:
    task = find_preset("flow-smoke").task
    assert isinstance(task, WarpTask)
    return task


def make_stage(root: Path, stage: Any, **options: Any) -> StageTask:
    smoke = smoke_task()
    return StageTask(
        net=smoke.net, deq=smoke.deq, batch=2, crop=(64, 72), stage=stage, data_dir=str(root),
        **options,
    )  # fmt: skip


def test_warps_of_validation_and_test_are_scored_by_the_same_metrics(model: DEQFlow) -> None:
    task = smoke_task()
    val, test = (evaluate(task, model, split, thorough=False) for split in SPLITS)
    assert set(val.metrics) == set(test.metrics)
    assert val.metrics["aepe"] == val.metrics["warps_aepe"] != test.metrics["aepe"]
    pairs = [sets["warps"][k] for sets in (task.val_set, task.test_set) for k in range(2)]
    assert len({pair.image1.sum().item() for pair in pairs}) == len(pairs)
    with_stereo = replace(task, stereo=True)
    assert list(with_stereo.val_set) == ["warps"]
    assert list(with_stereo.test_set) == ["warps", "motorcycle"]


def test_a_thorough_evaluation_traces_the_residual_of_every_evaluation(model: DEQFlow) -> None:
    task = smoke_task()
    short, long = (evaluate(task, model, "val", thorough=t).solver for t in (False, True))
    assert len(short.trace()) <= 1  # plain iteration looks at its last residual only
    assert "spectral_radius" not in short.summary()
    trace = long.trace()
    assert len(trace) == 4
    pair = task.val_set["warps"][0]
    with torch.no_grad():
        given = model.inject(pair.image1[None], pair.image2[None])
        z = model.zero_state(pair.image1[None])
        for residual in trace:
            last, z = z, model.update_block(*z, given)
            gap, size = (
                torch.cat([t.flatten() for t in ts]).norm()
                for ts in ([a - b for a, b in zip(z, last, strict=True)], z)
            )
            assert residual == pytest.approx(float(gap / size), rel=1e-3)
    assert "spectral_radius" in long.summary()
    assert long.nfe == short.nfe


@pytest.mark.parametrize("stage", ["chairs", "things", "sintel", "kitti"])
def test_the_best_checkpoint_is_chosen_by_pairs_of_neither_training_nor_test(
    tmp_path: Path, stage: str
) -> None:
    pytest.importorskip("av")
    task = make_stage(write_all_sets(tmp_path), stage, test_on=("sintel_clean", "kitti"))
    things = tmp_path / "FlyingThings3D"
    for part in ("frames_cleanpass", "frames_finalpass", "optical_flow"):
        shutil.copytree(things / part / "TRAIN", things / part / "TEST")
    task.open_data()
    train = {files.image1 for part in task.train_set.parts for files in part.pairs.files}
    if stage in ("sintel", "kitti"):
        assert task.val_set is None  # fine-tuning takes all labelled data
        seen = [name.startswith("seen_") for name in task.test_set]
        assert seen == [stage == "sintel", True]
        return
    (val,), test = _images(task.val_set), _images(task.test_set)
    assert not val & train
    assert not any(val & each or train & each for each in test)
    own = {"chairs": "chairs", "things": "things_clean"}[stage]
    assert replace(task, test_on=(own,)).val_set is None  # a set has one purpose


def _images(sets: Any) -> list[set[Path]]:
    assert all(isinstance(pairs, FlowSet) for pairs in sets.values())
    return [{files.image1 for files in pairs.files} for pairs in sets.values()]


def test_a_stage_trains_on_files_and_is_evaluated_on_files(tmp_path: Path) -> None:
    pytest.importorskip("av")
    task = make_stage(write_all_sets(tmp_path), "kitti", test_on=("kitti", "sintel_final"))
    assert task.steps_per_epoch == 1
    assert task.costly_batches
    model = task.build()
    loss = task.loss(model.train(), task.train_batch(0, 0), None)
    assert loss.value.isfinite()
    result = evaluate(task, model, "test", thorough=False)
    assert set(result.metrics) == {
        "aepe", "seen_kitti_aepe", "seen_kitti_f1", "sintel_final_aepe",
        "sintel_final_1px", "sintel_final_3px", "sintel_final_5px",
    }  # fmt: skip


def test_a_run_of_an_earlier_version_is_tested_on_the_sets_it_names() -> None:
    data = to_data(find_preset("flow-things-b"))
    data["task"]["validate"] = data["task"].pop("test_on")
    del data["task"]["val_pairs"]
    assert from_data(data) == find_preset("flow-things-b")


def test_examples_of_the_report_are_drawn_at_random(model: DEQFlow) -> None:
    task = replace(smoke_task(), eval_pairs=9, crop=(64, 64))
    with torch.no_grad():
        first, again = (draw_examples(model, task.test_set) for _ in range(2))
    images = [task.test_set["warps"][k].image1 for k in range(9)]
    chosen = [next(k for k in range(9) if images[k].equal(e.image1)) for e in first]
    assert len(set(chosen)) == 3
    assert chosen != [0, 1, 2]
    assert all(torch.equal(a.image1, b.image1) for a, b in zip(first, again, strict=True))


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
    with pytest.raises(DataError, match="there is no FlyingThings3D in"):
        task.open_data()
    for wrong, message in (
        ({"test_on": ("chair",)}, "did you mean 'chairs'"),
        ({"test_on": ()}, "needs a set"),
        ({"crop": (60, 64)}, "multiples of 8"),
        ({"batch": 0}, "at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            StageTask(**wrong)


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
