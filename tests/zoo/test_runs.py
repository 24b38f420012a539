"""Run folders, and models that come back from them."""

from __future__ import annotations

from pathlib import Path

import pytest

import deq_zoo
from deq_zoo.checkpoint import Checkpoint
from deq_zoo.errors import CheckpointError, ZooError
from deq_zoo.preset import Preset
from deq_zoo.run import Run
from deq_zoo.training import train
from tests.zoo.toy import toy


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

    def test_a_torn_line_of_the_log_is_skipped(self, run: Run) -> None:
        run.log("train", 1, {"loss": 1.0})
        with run.log_file.open("a") as file:
            file.write('{"kind": "train", "st')
        assert [line["step"] for line in run.lines()] == [1]

    def test_a_model_comes_back_ready_for_use(self, run: Run) -> None:
        train(run, toy(), quiet=True, cpu=True)
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
