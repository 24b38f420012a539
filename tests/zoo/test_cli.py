"""The commands of `deq-zoo`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import deq_zoo
from deq_zoo.cli import main
from deq_zoo.errors import DataError, ZooError
from deq_zoo.evaluation_settings import check_same_data
from deq_zoo.loading import open_model
from deq_zoo.predictions import Failure, OutFolder, Prediction, predict_each
from deq_zoo.run import Run
from tests.zoo.toy import Toy
from torchdeq import DEQConfig


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
        assert main(["evaluate", str(out), "--cpu", "--f_max_iter", "2", "--json"]) == 0
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
            (["train", "toy", "--resume", "--force"], "choose one"),
            (["train", "toy", "--f_opt", "m=3"], "has no option 'm'"),
            (["trian", "toy"], "unknown command 'trian'; did you mean 'train'"),
            (["list", "mdqe"], "unknown family 'mdqe'; did you mean 'mdeq'"),
            (["train", "mdeq-smok"], "unknown preset 'mdeq-smok'; did you mean 'mdeq-smoke'?"),
            (["train", "toy", "--f_slover", "x"], "did you mean '--f_solver'"),
            (["list", "--jsno"], "unknown argument '--jsno'; did you mean '--json'"),
            (["train", "toy", "--set", "lrr=1"], "unknown setting 'lrr'; did you mean 'lr'"),
            (["train", "toy", "--jac_loss_weight", "1"], "jac_loss_weight would have no effect"),
            (["train", "toy", "--b_tol", "1"], "b_tol would have no effect"),
            (["train", "toy", "--set", "b_tol=1"], "the gradient is not implicit; add ift=true"),
            (["train", "toy", "--ift", "--grad", "3"], "the gradient is implicit; add ift=false"),
            (
                ["train", "mdeq-smoke", "--set", "n_states=1", "--gamma", "0.5"],
                "gamma would have no",
            ),
            (["train", "mdeq-quick", "--core", "indexing"], "training has one state; add n_states"),
            (["train", "mdeq-quick", "--sup_loc", "1"], "sup_loc would have no effect"),
            (["train", "flow-nano", "--indexing", "2"], "n_states=3 places the states"),
            (["train", "toy", "--max-seconds", "-1"], "takes a number above 0, got '-1'"),
            (["train", "toy", "--max-seconds", "nan"], "takes a number above 0, got 'nan'"),
            (["train", "toy", "--seed", "x"], "--seed: takes a whole number, got 'x'"),
            (["train", "toy", "--steps", "3", "--epochs", "3"], "not allowed with"),
            (["train"], "required: name; deq-zoo train --help"),
            (["--verison"], "unknown argument '--verison'; did you mean '--version'"),
            (["-x"], "unknown argument '-x'; deq-zoo --help shows"),
            (["evaluate", "x", "--split", "tset"], "got 'tset'; did you mean 'test'"),
            (["evaluate", str(tmp_path)], "not a run folder"),
            (["predict", str(tmp_path / "x"), "a.png"], "no run folder or checkpoint"),
            (["predict", str(tmp_path / "x"), "a", "--out", __file__], "is a file: --out names a"),
            (["sample", str(tmp_path / "x")], "no run folder or checkpoint"),
            (["convert", str(tmp_path / "x"), "--preset", "toy"], "there is no file"),
            (["convert", __file__, "--preset", "toy", "--out", __file__, "--force"], "overwritten"),
            (["convert", "x"], "--preset NAME, or writes weights of ours"),
            (["convert", "x", "--to-authors"], "needs --out FILE"),
        ):
            assert (
                main([*argv, *(["--out", str(tmp_path / "o")] if argv[0] == "train" else [])]) == 2
            )
            error = capsys.readouterr().err
            assert error.startswith("deq-zoo: ")
            assert message in error
            assert "Traceback" not in error

    def test_data_that_moved_is_found_before_a_model_is_built(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        save_weights(Toy(), tmp_path, "--data-dir", str(tmp_path), "--f_max_iter", "7")
        preset: Any = deq_zoo.load(tmp_path / "net.safetensors", data_dir="elsewhere").preset
        assert preset.task.data_dir == str(Path("elsewhere").absolute())
        assert preset.task.deq.f_max_iter == 7
        capsys.readouterr()
        run = [str(tmp_path / "net.safetensors"), "--cpu", "--data-dir", "elsewhere"]
        assert main(["evaluate", *run, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["solver"]["nfe"] == 7
        assert main(["sample", *run]) == 0

    def test_settings_of_training_have_no_effect_on_an_evaluation(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        save_weights(Toy(), tmp_path)
        run = [str(tmp_path / "net.safetensors"), "--cpu"]
        for words, name in (
            (["--set", "lr=0.5"], "optim.lr"),
            (["--set", "steps=3"], "steps"),
            (["--set", "precision=bf16"], "precision"),
        ):
            assert main(["evaluate", *run, *words]) == 2
            assert f"{name} would have no effect: only training" in capsys.readouterr().err

    @pytest.mark.parametrize("words", [["--f_max_iter", "3"], ["--set", "eval_factor=2"]])
    def test_a_budget_that_another_option_decides_is_an_error(
        self, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        save_weights(Toy(), tmp_path, "--eval_f_max_iter", "7")
        assert main(["evaluate", str(tmp_path / "net.safetensors"), "--cpu", *words]) == 2
        assert "would have no effect: eval_f_max_iter=7 is" in capsys.readouterr().err

    def test_data_of_another_kind_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save_weights(Toy(), tmp_path)
        model, preset = open_model(tmp_path / "net.safetensors")
        model.facts = {"classes": ("yes", "no")}
        check_same_data(model, preset, "photos")  # nothing is known about this data
        monkeypatch.setattr(Toy, "facts", lambda self: {"classes": ["yes", "no"]})
        check_same_data(model, preset, "photos")
        monkeypatch.setattr(Toy, "facts", lambda self: {"classes": ["0", "1"]})
        message = r"data in photos is not that of the training: classes was .*'yes'.* is .*'0'"
        with pytest.raises(ZooError, match=message):
            check_same_data(model, preset, "photos")

    def test_a_folder_of_data_that_nothing_reads_is_an_error(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Toy, "reads_data_dir", False)
        for words in (["--data-dir", "photos"], ["--set", "data_dir=photos"]):
            assert main(["info", "toy", *words]) == 2
            assert "Toy reads no data set from disk: drop" in capsys.readouterr().err

    def test_results_as_json(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        run, file = tmp_path / "run", tmp_path / "net.pth"
        train = ["train", "toy", "--cpu", "--steps", "2", "--no-report", "--out", str(run)]
        torch.save({"state_dict": Toy().build().state_dict()}, file)
        for words, keys in (
            (train, {"run", "mse"}),
            (["report", str(run)], {"report"}),
            (["convert", str(file), "--preset", "toy"], {"out", "tensors", "key"}),
        ):
            assert main([*words, "--json"]) == 0
            assert json.loads(capsys.readouterr().out).keys() == keys

    def test_options_of_sampling_are_typed_and_named_by_the_family(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        save_weights(Toy(), tmp_path)
        capsys.readouterr()
        run = [str(tmp_path / "net.safetensors"), "--cpu"]
        assert main(["sample", *run, "--n-lines", "2", "scale=-3", "--text=a b"]) == 0
        assert capsys.readouterr().out == "0 x -3.0 a b\n1 x -3.0 a b\n"
        assert main(["sample", *run, "--scale", "-2"]) == 0
        assert capsys.readouterr().out == "0 x -2.0 \n"
        assert main(["sample", *run, "--list"]) == 0
        assert "--n-lines  (int, default: 1)" in capsys.readouterr().out
        for options, message in (
            (["--scael", "2"], "unknown option '--scael'; did you mean '--scale'?"),
            (["n_lins=2"], "did you mean '--n-lines'?"),
            (["--forec"], "did you mean '--force'?"),
            (["--scale", "big"], "scale takes float"),
            (["--scale"], "--scale needs a value"),
            (["4"], "read --name value"),
        ):
            assert main(["sample", *run, *options]) == 2
            assert message in capsys.readouterr().err

    def test_settings_that_do_not_fit_together_leave_no_folder(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def build(self: Toy, facts: Any = None) -> Any:
            raise ValueError("width must be even")

        monkeypatch.setattr(Toy, "build", build)
        assert main(["train", "toy", "--out", str(tmp_path / "run"), "--cpu"]) == 2
        assert "this preset cannot be built: width must be even" in capsys.readouterr().err
        assert not (tmp_path / "run").exists()

    def test_short_forms_of_settings(self, tmp_path: Path) -> None:
        words = ["train", "toy", "--out", str(tmp_path / "a"), "--cpu", "--quiet", "--no-report"]
        assert main([*words, "--epochs", "1", "--seed", "3", "--workers", "0"]) == 0
        preset = Run.open(tmp_path / "a").preset()
        assert (preset.epochs, preset.steps, preset.seed, preset.workers) == (1, 0, 3, 0)

    def test_evaluation_is_short_for_people_and_whole_for_programs(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        save_weights(Toy(), tmp_path)
        run = [str(tmp_path / "net.safetensors"), "--cpu"]
        values = {}
        for split in ("val", "test"):
            capsys.readouterr()
            assert main(["evaluate", *run, "--split", split]) == 0
            metric, solver = capsys.readouterr().out.splitlines()
            assert metric.startswith("mse: ")
            assert solver.startswith("solver: ")
            assert "100 % converged" in solver
            assert main(["evaluate", *run, "--split", split, "--json"]) == 0
            data = json.loads(capsys.readouterr().out)
            assert data["split"] == split
            assert len(data["solver"]["trace"]) > 3
            values[split] = data["metrics"]["mse"]
        assert values["val"] != values["test"]

    def test_info_and_list(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["info", "toy"]) == 0
        output = capsys.readouterr().out
        assert "81 parameters" in output
        assert "task.deq.f_max_iter = 20  (int)\n      evaluations of f in the forward" in output
        assert "jac_loss_weight" not in output
        assert "target" not in output.partition("settings, changed by")[2].split()
        assert main(["info", "toy", "--json", "--f_max_iter", "3"]) == 0
        info = json.loads(capsys.readouterr().out)
        by_path = {each["path"]: each for each in info["settings"]}
        assert info["parameters"] == 81
        assert by_path["task.deq.f_max_iter"]["value"] == 3
        assert by_path["optim.lr"]["meaning"] == "learning rate."
        assert main(["list", "mdeq", "--json"]) == 0
        names = [each["name"] for each in json.loads(capsys.readouterr().out)]
        assert "mdeq-smoke" in names
        assert all(name.startswith("mdeq-") for name in names)

    def test_a_preset_whose_size_depends_on_missing_data_is_shown_without_it(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def build(self: Toy, facts: Any = None) -> Any:
            raise DataError("toys are read from disk")

        monkeypatch.setattr(Toy, "build", build)
        assert main(["info", "toy"]) == 0
        output = capsys.readouterr().out
        assert "depends on the data: toys are read from disk" in output
        assert "optim.lr = 0.02" in output

    def test_help_about_a_preset_or_run_shows_its_own_values(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        save_weights(Toy(), tmp_path, "--f_max_iter", "7")
        file = str(tmp_path / "net.safetensors")
        for argv, texts in (
            (["train", "toy"], ["(here: 20)", "optim.lr = 0.02", "(here: auto)"]),
            (["info", "toy"], ["(here: 20)", "number of updates"]),
            (["train", "--help", "toy"], ["(here: 20)"]),
            (["convert", "x", "--preset=toy"], ["(here: 20)"]),
            (["evaluate", file], ["(here: 7)"]),
            (["sample", file], ["--n-lines  (int, default: 1)"]),
        ):
            capsys.readouterr()
            with pytest.raises(SystemExit) as stop:
                main([*argv, "--help"])
            assert stop.value.code == 0
            output = " ".join(capsys.readouterr().out.split())
            assert all(" ".join(text.split()) in output for text in texts), (argv, output)
            assert "jac_loss_weight" not in output
            assert "(default: 40)" not in output


class TestPredict:
    """Predictions of numbers in text files."""

    @pytest.fixture
    def words(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        save_weights(Toy(), tmp_path)
        for name, text in (("good", "3"), ("bad", "three"), ("last", "4")):
            (tmp_path / f"{name}.txt").write_text(text)
        monkeypatch.setattr(Toy, "predict", double_numbers)
        monkeypatch.chdir(tmp_path)
        return [
            "predict",
            "net.safetensors",
            "--cpu",
            "good.txt",
            "bad.txt",
            "none.txt",
            "last.txt",
        ]

    def test_a_broken_file_is_reported_and_the_others_go_on(
        self, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = sorted(tmp_path.iterdir())
        capsys.readouterr()
        assert main(words) == 1
        output = capsys.readouterr()
        assert output.out == "good.txt: 6\nlast.txt: 8\n"
        broken, missing = output.err.splitlines()
        assert broken == "deq-zoo: bad.txt: not a number"
        assert "none.txt" in missing
        assert main([word for word in words if word not in ("bad.txt", "none.txt")]) == 0
        assert sorted(tmp_path.iterdir()) == before  # nothing is made without --out

    def test_results_for_programs(
        self, words: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        capsys.readouterr()
        assert main([*words, "--json"]) == 1
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert lines[0] == {"source": "good.txt", "data": {"double": 6}, "files": []}
        assert lines[1] == {"source": "bad.txt", "failure": "not a number"}
        assert main([*words, "--out", "out"]) == 1
        listed = [
            json.loads(line) for line in Path("out/predictions.jsonl").read_text().splitlines()
        ]
        assert [line.keys() for line in listed] == [line.keys() for line in lines]
        assert listed[0]["files"] == ["out/good.txt"]
        assert Path("out/good.txt").read_text() == "6"

    def test_nothing_is_replaced_without_force(
        self, words: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([*words[:4], "--out", "out"]) == 0
        assert main([*words[:4], "--out", "out"]) == 2
        assert "replace it with --force" in capsys.readouterr().err
        Path("good.txt").write_text("5")
        assert main([*words[:4], "--out", "out", "--force"]) == 0
        assert Path("out/good.txt").read_text() == "10"

    def test_samples_are_listed_in_their_folder(self, words: list[str]) -> None:
        sample = ["sample", *words[1:3], "--out", "out", "--n-lines", "2"]
        assert main(sample) == 0
        assert len(Path("out/samples.jsonl").read_text().splitlines()) == 2
        assert main(sample) == 2
        assert main([*sample, "--force"]) == 0


def double_numbers(
    self: Toy, model: Any, paths: Sequence[Path], out: OutFolder
) -> Iterator[Prediction | Failure]:
    """Implement `Toy.predict`: read numbers, double them, and write them if a folder was named."""

    def double(path: Path) -> Prediction:
        text = path.read_text()
        if not text.isdecimal():
            raise ZooError("not a number")
        value = 2 * int(text)
        files = (out.write(path.name, str(value)),) if out.asked else ()
        return Prediction(str(path), f"{path}: {value}", {"double": value}, files)

    return predict_each(paths, double)
