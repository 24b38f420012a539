"""The zoo's frame: settings, checkpoints, resuming and messages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import deq_zoo
from deq_zoo.checkpoint import Checkpoint, random_state, restore_random_state
from deq_zoo.cli import main
from deq_zoo.errors import CheckpointError, ZooError
from deq_zoo.optim import SGD, Adam, Constant, Cosine, MultiStep, OneCycle
from deq_zoo.preset import Preset
from deq_zoo.run import Run
from deq_zoo.task import Score, Shard, batch_indices, steps_in_epoch
from deq_zoo.train import train
from deq_zoo.values import from_data, paths, to_data, with_settings
from tests.zoo.toy import Toy, toy
from torchdeq import DEQConfig


def read_weights(run: Run) -> dict[str, torch.Tensor]:
    return Checkpoint.load(run.last).model


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "run", "toy", toy())


class TestValues:
    def test_a_preset_survives_json(self) -> None:
        preset = replace(toy(), optim=SGD(schedule=MultiStep(at=(0.2, 0.8))))
        again = from_data(json.loads(json.dumps(to_data(preset))))
        assert again == preset
        assert again.optim.schedule.at == (0.2, 0.8)
        assert again.task.deq.f_max_iter == 20

    def test_options_that_were_left_alone_stay_so(self) -> None:
        again = from_data(to_data(toy())).task.deq
        assert again.given == toy().task.deq.given
        assert again.get("norm_type", "mine") == "mine"
        changed = with_settings(toy(), ["tau=0.5"]).task.deq
        assert changed.given == again.given | {"tau"}

    def test_settings_are_typed_and_may_be_shortened(self) -> None:
        changed = with_settings(
            toy(), ["f_max_iter=7", "task.width=4", "optim.lr=3e-4", "precision=bf16",
                    "sizes=10,20", "data_dir=/x", "indexing=1,2", "ift=true", "betas=(0.8, 0.9)"],
        )  # fmt: skip
        assert changed.task.deq.f_max_iter == 7
        assert changed.task.deq.indexing == [1, 2]
        assert changed.task.deq.ift is True
        assert (changed.task.width, changed.task.sizes) == (4, (10, 20))
        assert changed.optim.lr == 3e-4
        assert changed.optim.betas == (0.8, 0.9)
        assert changed.task.data_dir == "/x"
        assert with_settings(changed, ["data_dir=none"]).task.data_dir is None

    @pytest.mark.parametrize(
        ("setting", "message"),
        [
            ("widht=3", "unknown setting 'widht'; did you mean 'width'"),
            ("width", "a setting reads key=value, got 'width'"),
            ("width=3.5", "task.width takes int, got '3.5'"),
            ("precision=half", "precision is one of no, bf16, fp16, got 'half'"),
            ("ift=perhaps", "task.deq.ift takes bool, got 'perhaps'"),
            ("tau=2", r"tau=2.0: tau must lie in \(0, 1\]"),
            ("steps=0", "give either steps or epochs"),
            ("steps=inf", "steps takes int, got 'inf'"),
            ("seed=-1", "seed must be a number from 0"),
            ("lr=-1", "lr must be at least 0 and finite"),
            ("lr=nan", "lr must be at least 0 and finite"),
            ("betas=0.9", "optim.betas takes 2 values, got 1"),
            ("clip=-1", "clip must be at least 0"),
            ("clip_value=-1", "clip_value must be at least 0"),
        ],
    )
    def test_a_wrong_setting_is_an_error(self, setting: str, message: str) -> None:
        with pytest.raises(ZooError, match=message):
            with_settings(toy(), [setting])

    def test_steps_and_epochs_replace_each_other(self) -> None:
        by_epochs = with_settings(toy(), ["epochs=3"])
        assert (by_epochs.steps, by_epochs.epochs) == (0, 3)
        for settings in (["steps=5"], ["steps=5", "epochs=0"], ["epochs=0", "steps=5"]):
            changed = with_settings(by_epochs, settings)
            assert (changed.steps, changed.epochs) == (5, 0)

    def test_another_solver_does_not_inherit_options(self) -> None:
        preset = toy().with_deq(f_solver="broyden", f_solver_kwargs={"l_thres": None})
        assert preset.with_deq(f_solver="anderson").task.deq.f_solver_kwargs == {}
        assert preset.with_deq(f_max_iter=3).task.deq.f_solver_kwargs == {"l_thres": None}

    def test_a_file_cannot_name_any_class(self) -> None:
        with pytest.raises(ZooError, match=r"trust\('subprocess'\)"):
            from_data({"class": "subprocess:Popen", "args": ["true"]})
        with pytest.raises(ZooError, match="does not exist"):
            from_data({"class": "deq_zoo.optim:Nothing"})
        with pytest.raises(ZooError, match="another version wrote the file"):
            from_data({"class": "deq_zoo.optim:Adam", "lrr": 1.0})

    def test_every_field_has_a_path(self) -> None:
        all_paths = {path for path, _, _ in paths(toy())}
        assert {"task.deq.f_solver", "optim.lr", "optim.betas", "seed", "task.sizes"} <= all_paths


class TestSchedules:
    def test_values(self) -> None:
        assert Constant().factor(5, 10) == 1
        cosine = Cosine(floor=0.1, warmup=4)
        assert [cosine.factor(k, 24) for k in (0, 3, 4, 14, 24)] == pytest.approx(
            [0.25, 1, 1, 0.55, 0.1]
        )
        assert OneCycle(0.5).factor(0, 10) == pytest.approx(0.2)
        assert OneCycle(0.5).factor(5, 10) == pytest.approx(1.0)
        assert OneCycle(0.5).factor(9, 10) == pytest.approx(0.2)
        assert [MultiStep().factor(k, 8) for k in (3, 4, 6)] == pytest.approx([1, 0.1, 0.01])

    def test_every_group_keeps_its_own_base(self) -> None:
        p, q = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
        optim = Adam(lr=0.1, schedule=MultiStep())
        optimizer = optim.make([p])
        optimizer.add_param_group({"params": [q], "lr": 0.5, "base_lr": 0.5})
        for _ in range(2):
            optim.set_rate(optimizer, 9, 10)
        assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.001, 0.005])


class TestBatches:
    def test_an_epoch_is_a_permutation_and_shards_share_it(self) -> None:
        assert steps_in_epoch(10, 4) == 3
        assert steps_in_epoch(10, 4, drop_last=True) == 2
        epoch = torch.cat([batch_indices(10, 4, k, 0) for k in range(3)])
        assert sorted(epoch.tolist()) == list(range(10))
        again = torch.cat([batch_indices(10, 4, k, 0) for k in range(3, 6)])
        assert again.tolist() != epoch.tolist()
        halves = [batch_indices(10, 4, 1, 0, Shard(r, 2)) for r in range(2)]
        assert sorted(torch.cat(halves).tolist()) == sorted(batch_indices(10, 4, 1, 0).tolist())
        assert batch_indices(10, 4, 1, 1).tolist() != batch_indices(10, 4, 1, 0).tolist()


class TestCheckpoints:
    def test_everything_comes_back(self, tmp_path: Path) -> None:
        shared = torch.randn(3)
        checkpoint = Checkpoint(
            7, {"a": shared, "b": shared, "c": torch.randn(2, 2).mT},
            {"state": {0: {"step": torch.tensor(3.0), "m": shared}}, "param_groups": [{"lr": 0.1}]},
            carry=(torch.ones(2, dtype=torch.bfloat16), None, [1, "x"]), randomness=random_state(),
            notes={"best": None}, config={"name": "toy"},
        )  # fmt: skip
        checkpoint.save(tmp_path / "deep" / "x.safetensors")
        again = Checkpoint.load(tmp_path / "deep" / "x.safetensors")
        torch.testing.assert_close(again.model, checkpoint.model)
        assert again.optimizer["param_groups"] == [{"lr": 0.1}]
        assert torch.equal(again.optimizer["state"][0]["m"], shared)
        assert isinstance(again.carry, tuple)
        assert again.carry[0].dtype == torch.bfloat16
        expected = torch.rand(3), __import__("numpy").random.rand(), __import__("random").random()
        restore_random_state(again.randomness)
        got = torch.rand(3), __import__("numpy").random.rand(), __import__("random").random()
        assert torch.equal(got[0], expected[0])
        assert got[1:] == expected[1:]
        assert not list(tmp_path.rglob("*.part"))

    def test_bad_files_are_errors(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="there is no checkpoint"):
            Checkpoint.load(tmp_path / "none.safetensors")
        broken = tmp_path / "broken.safetensors"
        broken.write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{garbage")
        with pytest.raises(CheckpointError, match="cannot be read"):
            Checkpoint.load(broken)
        from safetensors.torch import save_file

        save_file({"a": torch.ones(1)}, tmp_path / "other.safetensors")
        with pytest.raises(CheckpointError, match="not a checkpoint of this zoo"):
            Checkpoint.load(tmp_path / "other.safetensors")

    def test_a_failed_write_leaves_the_old_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "x.safetensors"
        Checkpoint(1, {"a": torch.ones(1)}).save(path)

        def raise_full(*args: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("deq_zoo.checkpoint.save_file", raise_full)
        with pytest.raises(
            CheckpointError,
            match=r"No space left .* that was there is intact",
        ):
            Checkpoint(2, {"a": torch.ones(1)}).save(path)
        assert Checkpoint.load(path).step == 1


class TestTraining:
    def test_learns_logs_and_saves(self, run: Run) -> None:
        result = train(run, toy(), quiet=True, cpu=True)
        assert result.finished
        logged = [line["loss"] for line in run.lines("train")]
        assert [line["step"] for line in run.lines("train")] == [4, 8, 12, 16, 20, 24]
        assert logged[-1] < logged[0]
        evaluations = list(run.lines("eval"))
        assert [line["step"] for line in evaluations] == [8, 16, 24]
        assert result.best == min(line["metrics"]["mse"] for line in evaluations)
        solver = evaluations[-1]["solver"]
        assert sum(solver["statuses"].values()) == 32
        assert 0 < solver["spectral_radius"] < 1
        assert solver["trace"][-1] < solver["trace"][0]
        assert Checkpoint.load(run.last).step == 24

    def test_an_interrupted_run_resumes_to_the_same_weights(self, run: Run, tmp_path: Path) -> None:
        train(run, toy(), quiet=True, cpu=True)
        other = Run.create(tmp_path / "other", "toy", toy())
        train(other, toy(), quiet=True, cpu=True, max_seconds=0)  # ends after the first step
        assert Checkpoint.load(other.last).step == 1
        other.log("train", 2, {"loss": 0.0})  # written after the checkpoint, before a kill
        result = train(other, toy(), quiet=True, cpu=True, resume=True)
        assert result.finished
        torch.testing.assert_close(read_weights(other), read_weights(run), rtol=0, atol=0)
        assert [line["step"] for line in other.lines("train")] == [4, 8, 12, 16, 20, 24]

    def test_a_run_without_a_checkpoint_begins_anew(self, run: Run) -> None:
        result = train(run, toy(), quiet=True, cpu=True, resume=True)
        assert result.finished

    def test_a_finished_run_says_what_it_reached(self, run: Run) -> None:
        first = train(run, toy(), quiet=True, cpu=True)
        again = train(run, toy(), quiet=True, cpu=True, resume=True)
        assert again.finished
        assert again.metrics == first.metrics

    def test_the_logged_loss_is_the_mean_of_its_window(self, tmp_path: Path) -> None:
        fine = replace(toy(), log_every=1)
        coarse = replace(toy(), log_every=10, steps=20, eval_every=7)
        logs = []
        for name, preset in (("fine", fine), ("coarse", coarse)):
            run = Run.create(tmp_path / name, "toy", replace(preset, steps=20))
            train(run, replace(preset, steps=20), quiet=True, cpu=True)
            logs.append([line["loss"] for line in run.lines("train")])
        means = [sum(logs[0][k : k + 10]) / 10 for k in (0, 10)]
        assert logs[1] == pytest.approx(means, rel=1e-5)

    def test_half_precision_keeps_the_solvers_counts(self, tmp_path: Path) -> None:
        preset = replace(toy(), precision="bf16", steps=2, log_every=1)
        run = Run.create(tmp_path / "run", "toy", preset)
        train(run, preset, quiet=True, cpu=True)
        assert all(line["nfe"] > 1 for line in run.lines("train"))
        with pytest.raises(ZooError, match="fp16 needs an accelerator"):
            train(run, replace(preset, precision="fp16"), quiet=True, cpu=True)

    def test_a_loss_that_is_no_number_ends_the_run(self, tmp_path: Path) -> None:
        preset = replace(toy(), optim=SGD(lr=1e30))
        run = Run.create(tmp_path / "run", "toy", preset)
        with pytest.raises(ZooError, match=r"the loss is .* lower the learning rate"):
            train(run, preset, quiet=True, cpu=True)
        assert all(torch.isfinite(t).all() for t in read_weights(run).values())

    def test_a_score_that_is_no_number_never_wins(self) -> None:
        score = Score("accuracy")
        nan = float("nan")
        assert not score.better(nan, None)
        assert score.better(0.5, nan)
        assert score.better(0.5, None)

    @pytest.mark.slow
    def test_two_processes_train_one_model(self, tmp_path: Path) -> None:
        root, out = Path(__file__).parents[2], tmp_path / "run"
        code = (
            "import sys; from tests.zoo import toy; from deq_zoo.cli import main;"
            "sys.exit(main(sys.argv[1:]))"
        )
        script = tmp_path / "go.py"
        script.write_text(code)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2",
                   "--master_addr", "127.0.0.1", "--master_port", "29655", str(script),
                   "train", "toy", "--cpu", "--out", str(out), "--set", "steps=12"]  # fmt: skip
        env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=env, cwd=root, timeout=240)
        run = Run.open(out)
        assert [line["step"] for line in run.lines("train")] == [4, 8, 12]
        assert (out / "report.html").exists()
        assert len(Checkpoint.load(run.last).carry) == 2
        subprocess.run([*command, "--resume"], check=True, env=env, cwd=root, timeout=240)

    def test_accumulation_and_clipping(self, tmp_path: Path) -> None:
        preset = replace(toy(), accumulate=2, clip=0.1, steps=4, optim=SGD(lr=0.1, momentum=0.0))
        run = Run.create(tmp_path / "run", "toy", preset)
        train(run, preset, quiet=True, cpu=True)
        torch.manual_seed(0)
        assert Checkpoint.load(run.last).step == 4

    def test_no_entry_of_a_clipped_gradient_is_larger_than_allowed(self, tmp_path: Path) -> None:
        states = []
        for name, steps in (("one", 1), ("two", 2)):
            preset = replace(
                toy(), steps=steps, clip_value=1e-3, optim=SGD(lr=1.0, momentum=0.0), eval_every=0
            )
            run = Run.create(tmp_path / name, "toy", preset)
            train(run, preset, quiet=True, cpu=True)
            states.append(read_weights(run))
        largest = max(float((states[1][key] - states[0][key]).abs().max()) for key in states[0])
        assert largest == pytest.approx(1e-3, rel=1e-3)

    @pytest.mark.slow
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    def test_a_signal_leaves_a_run_that_resumes_exactly(
        self, number: signal.Signals, tmp_path: Path
    ) -> None:
        preset = replace(toy(), steps=400, save_every=7, eval_every=400)
        whole = Run.create(tmp_path / "whole", "toy", preset)
        train(whole, preset, quiet=True, cpu=True)
        killed = Run.create(tmp_path / "killed", "toy", preset)
        code = (
            "from pathlib import Path; from tests.zoo import toy; from deq_zoo.run import Run;"
            "from deq_zoo.train import train; import sys;"
            f"run = Run.open(Path({str(killed.path)!r}));"
            "r = train(run, run.preset(), quiet=True, cpu=True); sys.exit(128 + r.interrupted)"
        )
        process = subprocess.Popen([sys.executable, "-c", code])
        while not killed.log_file.exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait() == (-9 if number == signal.SIGKILL else 128 + number)
        assert 0 <= Checkpoint.load(killed.last).step < 400
        train(killed, preset, quiet=True, cpu=True, resume=True)
        torch.testing.assert_close(read_weights(killed), read_weights(whole), rtol=0, atol=0)


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


def save_weights(task: Toy, folder: Path, *options: str) -> dict[str, torch.Tensor]:
    """Save weights in the shape of a release, convert them to `net.safetensors` and return them."""
    state = task.build().state_dict()
    released = {f"module.{k.replace('f.', 'linear.')}": v for k, v in state.items()}
    torch.save({"state_dict": released, "epoch": 3}, folder / "net.pth")
    assert main(["convert", str(folder / "net.pth"), "--preset", "toy", *options]) == 0
    return state


class TestCommands:
    def test_train_report_evaluate(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "run"
        common = ["train", "toy", "--out", str(out), "--cpu"]
        assert main([*common, "--ift", "--b_solver", "gmres", "--set", "steps=8"]) == 0
        output = capsys.readouterr().out
        lines = [json.loads(line) for line in output.splitlines()]
        assert lines[0]["of"] == 8
        assert lines[-1]["mse"] > 0
        assert Run.open(out).preset().task.deq == DEQConfig(
            f_max_iter=20, f_tol=1e-4, on_failure="ignore", ift=True, b_solver="gmres"
        )
        page = (out / "report.html").read_text()
        assert "<h2>Examples</h2>" in page
        assert "http" not in page.replace("http-equiv", "")
        assert {p.stem for p in (out / "pictures").glob("*.png")} >= {"loss", "convergence"}
        assert main(common) == 2
        assert "exists already" in capsys.readouterr().err
        assert main([*common, "--resume"]) == 0
        assert main([*common, "--resume", "--set", "width=3"]) == 2
        assert "keeps its settings" in capsys.readouterr().err
        assert main(["evaluate", str(out), "--cpu", "--f_max_iter", "2"]) == 0
        assert json.loads(capsys.readouterr().out)["solver"]["nfe"] == 2
        assert main(["report", str(out)]) == 0

    def test_mistakes_are_one_paragraph(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for argv, message in (
            (["train", "tyo"], "unknown preset 'tyo'; did you mean 'toy'"),
            (["train", "toy", "--tau", "3"], "tau must lie in"),
            (["train", "toy", "--f_solver", "andersen"], "did you mean 'anderson'"),
            (["train", "toy", "--set", "f_solver=andersen"], "did you mean 'anderson'"),
            (["train", "toy", "--set", "width=-1"], "cannot be built"),
            (["train", "toy", "--resume", "--force"], "choose one"),
            (["train", "toy", "--f_opt", "m=3"], "has no option 'm'"),
            (["list", "mdqe"], "unknown family 'mdqe'"),
            (["evaluate", str(tmp_path)], "not a run folder"),
            (["predict", str(tmp_path / "x"), "a.png"], "no run folder or checkpoint"),
            (["convert", str(tmp_path / "x"), "--preset", "toy"], "there is no file"),
        ):
            assert (
                main([*argv, *(["--out", str(tmp_path / "o")] if argv[0] == "train" else [])]) == 2
            )
            error = capsys.readouterr().err
            assert error.startswith("deq-zoo: ")
            assert message in error
            assert "Traceback" not in error

    def test_convert_reads_released_weights_and_nothing_else(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        state = save_weights(Toy(), tmp_path)
        assert main(["convert", str(tmp_path / "net.pth"), "--preset", "toy"]) == 2
        assert "exists already" in capsys.readouterr().err
        model = deq_zoo.load(tmp_path / "net.safetensors")
        torch.testing.assert_close(dict(model.state_dict()), dict(state))

        class Bomb:
            def __reduce__(self) -> Any:
                return os.system, ("true",)

        torch.save({"state_dict": Bomb()}, tmp_path / "bomb.pth")
        assert main(["convert", str(tmp_path / "bomb.pth"), "--preset", "toy"]) == 2
        assert "cannot be read as weights" in capsys.readouterr().err

    def test_data_that_moved_is_found_before_a_model_is_built(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        save_weights(Toy(), tmp_path, "--data-dir", str(tmp_path), "--f_max_iter", "7")
        preset: Any = deq_zoo.load(tmp_path / "net.safetensors", data_dir="elsewhere").preset
        assert preset.task.data_dir == str(Path("elsewhere").absolute())
        assert preset.task.deq.f_max_iter == 7
        capsys.readouterr()
        run = [str(tmp_path / "net.safetensors"), "--cpu", "--data-dir", "elsewhere"]
        assert main(["evaluate", *run]) == 0
        assert json.loads(capsys.readouterr().out)["solver"]["nfe"] == 7
        assert main(["sample", *run]) == 0

    def test_options_of_sampling_are_typed_and_named_by_the_family(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        save_weights(Toy(), tmp_path)
        capsys.readouterr()
        run = [str(tmp_path / "net.safetensors"), "--cpu"]
        assert main(["sample", *run, "--n-lines", "2", "scale=-3", "--text=a b"]) == 0
        assert capsys.readouterr().out == "0 x -3.0 a b\n1 x -3.0 a b\n"
        assert main(["sample", *run, "--list"]) == 0
        assert "--n-lines (default: 1)" in capsys.readouterr().out
        for options, message in (
            (["--scael", "2"], "did you mean 'scale'"),
            (["--scale", "big"], "scale takes float"),
            (["--scale"], "--scale needs a value"),
            (["4"], "read --name value"),
        ):
            assert main(["sample", *run, *options]) == 2
            assert message in capsys.readouterr().err
        with pytest.raises(SystemExit):
            main(["list", "--nonsense"])

    def test_info_and_list(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["info", "toy"]) == 0
        output = capsys.readouterr().out
        assert "81 parameters" in output
        assert "task.deq.f_max_iter = 20" in output
        assert main(["list"]) == 0
        assert "toy" in capsys.readouterr().out
