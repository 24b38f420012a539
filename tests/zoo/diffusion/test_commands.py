"""Denoisers by command: training, evaluation, sampling and inversion."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from deq_zoo.cli import main
from deq_zoo.diffusion import samples
from deq_zoo.diffusion.options import Sampling
from deq_zoo.predictions import OutFolder
from tests.zoo.diffusion.nets import write_picture
from tests.zoo.diffusion.smoke import make_model
from torchdeq import StopRule


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "smoke"
    assert main(["train", "diffusion-smoke", "--cpu", "--quiet", "--out", str(out)]) == 0
    return out


def test_smoke_trains_and_reports(run: Path) -> None:
    page = (run / "report.html").read_text()
    assert "solved as one equilibrium" in page
    assert "test images drawn at random" in page
    evaluations = [line for line in (run / "log.jsonl").read_text().splitlines() if "eval" in line]
    assert len(evaluations) > 1  # a curve of one point is no curve


def test_smoke_trains_in_bfloat16(tmp_path: Path) -> None:
    words = ["train", "diffusion-smoke", "--cpu", "--quiet", "--no-report", "--set", "steps=3"]
    assert main([*words, "--set", "precision=bf16", "--out", str(tmp_path / "run")]) == 0


def test_sampling_by_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sample", str(run), "--cpu", "--n", "3", "--steps", "8", "--eta", "0.5", "--seed", "4"]
    for solver in ("anderson", "fixed_point_iter", "sequential"):
        assert main([*words, "--out", str(tmp_path / solver), "--solver", solver]) == 0
        with Image.open(tmp_path / solver / "samples-4.png") as image:
            assert image.size == (3 * 10 - 2, 8)
    lines = capsys.readouterr().out.splitlines()
    assert all("3 images in" in line and "rounds" in line for line in lines)
    assert main([*words, "--out", str(tmp_path / "anderson")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([*words, "--out", str(tmp_path / "other"), "--solver", "andersen"]) == 2
    assert "did you mean 'anderson'" in capsys.readouterr().err


def test_samples_that_did_not_settle_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "StopRule", lambda n, tol, mode: StopRule(2, tol, mode))
    result = samples.sample_images(make_model(), Sampling(n=1), OutFolder(tmp_path))
    assert "did not settle" in result.text
    assert result.data["settled"] is False


def test_inversion_by_command(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_picture(tmp_path / "in" / "disc.png")
    words = ["predict", str(run), str(tmp_path / "in" / "disc.png"), "--cpu", "--out"]
    assert main([*words, str(tmp_path / "o")]) == 0
    assert "PSNR" in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "o").iterdir()}
    assert names == {
        "disc-noise.safetensors",
        "disc-reconstruction.png",
        "predictions.jsonl",
    }
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["disc.png"]


def test_wrong_options_of_sampling_are_errors(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sample", str(run), "--cpu", "--out", str(tmp_path)]
    wrong = {"--n": "0", "--steps": "1001", "--eta": "2", "--tol": "-1", "--window": "-1"}
    for name, value in wrong.items():
        assert main([*words, name, value]) == 2
        assert capsys.readouterr().err.count("\n") < 4


def test_evaluation_includes_inversion(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run), "--cpu", "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert metrics.keys() == {"loss", "chain_error", "inversion_sse", "inversion_psnr"}
    assert metrics["chain_error"] < 1e-3
