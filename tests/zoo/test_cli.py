"""The commands of `deq-zoo`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import deq_zoo
from deq_zoo.cli import main
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
