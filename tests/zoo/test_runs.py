"""Run folders, and models that come back from them."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import deq_zoo
from deq_zoo.checkpoint import Checkpoint
from deq_zoo.errors import CheckpointError, ZooError
from deq_zoo.preset import Preset
from deq_zoo.process_id import ProcessId
from deq_zoo.run import Run
from deq_zoo.training import Result
from tests.zoo.toy import toy


def train_toy(out: Path, **options: Any) -> Result:
    return deq_zoo.train("toy", out=out, quiet=True, cpu=True, report=False, **options)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "run", "toy", toy())


class TestRuns:
    def test_a_folder_is_never_overwritten_by_accident(self, run: Run, tmp_path: Path) -> None:
        with pytest.raises(ZooError, match="exists already: go on with --resume"):
            Run.create(run.path, "toy", toy())
        Run.create(run.path, "toy", toy(), force=True)
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.tex").write_text("x")
        with pytest.raises(ZooError, match="is not a run folder; --force replaces nothing else"):
            Run.create(tmp_path / "mine", "toy", toy(), force=True)
        with pytest.raises(ZooError, match="is not a run folder: choose another with --out"):
            Run.create(tmp_path / "mine", "toy", toy())
        with pytest.raises(ZooError, match=r"it has no config\.json"):
            Run.open(tmp_path / "mine")

    def test_force_removes_a_run_and_nothing_else(self, run: Run, tmp_path: Path) -> None:
        (run.path / "thesis.tex").write_text("x")
        run.log("train", 1, {"loss": 1.0})
        Run.create(run.path, "toy", toy(), force=True)
        assert (run.path / "thesis.tex").exists()
        assert not run.log_file.exists()
        other = tmp_path / "other"
        other.mkdir()
        (other / "config.json").write_text('{"editor": "vim"}')
        with pytest.raises(ZooError, match="is not a run folder"):
            Run.create(other, "toy", toy(), force=True)
        with pytest.raises(ZooError, match="cannot make the run folder"):
            Run.create(other / "config.json" / "x", "toy", toy())

    @pytest.mark.parametrize("text", ["{}", "[]", "5", '{"name": 1, "preset": {"class": 3}}'])
    def test_a_damaged_configuration_is_an_error(self, run: Run, text: str) -> None:
        run.config.write_text(text)
        with pytest.raises(ZooError, match=r"config\.json"):
            run.preset()

    def test_lines_that_training_does_not_write_are_skipped(self, run: Run) -> None:
        run.log("train", 1, {"loss": 1.0, "nfe": float("nan")})
        run.log("eval", 2, {"metrics": {"mse": 0.5}, "solver": {"nfe": 3, "residual": None}})
        strange = [
            '{"kind": "train", "step": "x", "loss": 1}',
            '{"kind": "train", "step": true}',
            '{"kind": "eval", "step": 3}',
            '{"kind": "eval", "step": 3, "metrics": []}',
            '{"kind": "test", "step": 3, "metrics": {"mse": "low"}}',
            '{"kind": ["train"], "step": 3}',
            "[1, 2]",
            "null",
            '{"kind": "train", "step": 4, "loss": "x", "lr": 0.5}',
            '{"kind": "eval", "step": 4, "metrics": {"mse": 1}, "solver": {"trace": ["x"]}}',
            '{"kind": "train", "st',
        ]
        with run.log_file.open("a") as file:
            file.write("\n".join(strange))
        nothing: dict[str, Any] = {"nfe": None, "residual": None, "statuses": {}, "trace": []}
        assert list(run.lines()) == [
            {"kind": "train", "step": 1, "loss": 1.0, "nfe": None},
            {"kind": "eval", "step": 2, "metrics": {"mse": 0.5}, "solver": nothing | {"nfe": 3}},
            {"kind": "train", "step": 4, "lr": 0.5},
            {"kind": "eval", "step": 4, "metrics": {"mse": 1}, "solver": nothing},
        ]
        run.forget_after(2)
        assert [line["step"] for line in run.lines()] == [1, 2]

    def test_strange_lines_do_not_end_a_resume(self, run: Run) -> None:
        train_toy(run.path, force=True, max_seconds=1e-9)
        with run.log_file.open("a") as file:
            file.write('{"kind": "eval", "step": "x"}\n{"kind": "eval", "step": 1}\n')
        assert train_toy(run.path, resume=True).finished

    @pytest.mark.parametrize("left", ["config.json.part", "lock.json", "last.safetensors.part"])
    @pytest.mark.parametrize("options", [{"force": True}, {"resume": True}, {}])
    def test_a_half_made_folder_is_in_nobodys_way(
        self, tmp_path: Path, left: str, options: dict[str, bool]
    ) -> None:
        out = tmp_path / "run"
        out.mkdir()
        gone = ProcessId(**{**asdict(ProcessId.own()), "started": "0"})
        (out / left).write_text(json.dumps(asdict(gone)) if left == "lock.json" else "{")
        result = train_toy(out, **options)
        assert result.finished
        assert not list(out.glob("*.part"))
        assert not (out / "lock.json").exists()

    def test_a_lost_checkpoint_does_not_begin_a_run_again(self, run: Run) -> None:
        train_toy(run.path, force=True)
        run.last.unlink()
        log = run.log_file.read_text()
        with pytest.raises(ZooError, match=r"has best\.safetensors but not last\.safetensors"):
            train_toy(run.path, resume=True)
        assert run.log_file.read_text() == log
        assert run.best.exists()

    def test_a_model_comes_back_ready_for_use(self, run: Run) -> None:
        train_toy(run.path, force=True)
        model = deq_zoo.load(run.path)
        assert not model.training
        assert isinstance(model.preset, Preset)
        assert deq_zoo.load(run.best).preset == toy()
        with pytest.raises(ZooError, match="no run folder or checkpoint"):
            deq_zoo.load(run.path / "nothing")
        checkpoint = Checkpoint.load(run.last)
        del checkpoint.model["out.bias"]
        checkpoint.save(run.last)
        run.best.unlink()
        with pytest.raises(CheckpointError, match=r"does not fit the model: it lacks out\.bias$"):
            deq_zoo.load(run.path)

    def test_weights_of_another_run_are_refused(self, run: Run, tmp_path: Path) -> None:
        train_toy(run.path, force=True)
        other = train_toy(tmp_path / "other", lr=0.5).run
        moved = run.preset().with_data_dir(tmp_path)
        run.write_config("toy", replace(moved, steps=0, epochs=9))  # the same model
        assert deq_zoo.load(run.path).preset is not None
        shutil.copy(other.best, run.best)
        with pytest.raises(CheckpointError, match=r"comes from another run .* in optim\.lr$"):
            deq_zoo.load(run.path)
        shutil.copy(other.last, run.last)
        with pytest.raises(CheckpointError, match="comes from another run"):
            train_toy(run.path, resume=True)
