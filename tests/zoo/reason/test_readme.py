"""The programs and commands of the family's README run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import deq_zoo
from deq_zoo.cli import main
from deq_zoo.preset import find_preset
from deq_zoo.reason.convert import to_authors
from tests.code_blocks import code_blocks, run_blocks
from tests.zoo.reason.inputs import PUZZLES

README = Path(__file__).parents[3] / "deq_zoo" / "reason" / "README.md"
TEXT = README.read_text()
COMMANDS = re.findall(r"^    (deq-zoo [^#\n]*)", TEXT, re.MULTILINE)
GRADIENTS = (
    "--set gradient=deq --backward phantom --grad 2",
    "--backward reversible --f_max_iter 4",
    "--ift --b_solver gmres",
)


def test_the_programs_run_from_top_to_bottom() -> None:
    program = run_blocks(code_blocks(README))
    assert program["out"].prediction.shape == (8, 16, 6)


@pytest.mark.parametrize("options", GRADIENTS)
@pytest.mark.filterwarnings("ignore::torchdeq.solver.ConvergenceWarning")
def test_options_of_the_equilibrium_train_with_their_gradient(options: str, tmp_path: Path) -> None:
    assert options in TEXT
    words = [*shlex.split(options), "--steps", "2", "--out", str(tmp_path / "run"), "--no-report"]
    command = ["train", "reason-smoke", "--quiet", *words]
    assert main([*command, "--set", "gradient=deq"]) == 0


@pytest.mark.filterwarnings("ignore::torchdeq.solver.ConvergenceWarning")
def test_python_takes_options_and_settings_together(tmp_path: Path) -> None:
    common: dict[str, Any] = {"out": tmp_path / "run", "report": False, "quiet": True}
    result = deq_zoo.train("reason-smoke", gradient="deq", ift=True, steps=1, **common)
    assert result.run.preset().task.deq.ift


def test_the_other_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "reason-quick"
    deq_zoo.train("reason-smoke", out=run, steps=1, report=False, quiet=True)
    Path("puzzle.txt").write_text(PUZZLES[0])
    Path("sudoku6.txt").write_text(".3......1...3.4..2...4...1.2..2...63")
    Path("maze.txt").write_text("#####\n#S  #\n### #\n#G  #\n#####")
    theirs = to_authors(find_preset("reason-eqr-sudoku").task.build().state_dict())
    torch.save(theirs, "checkpoint.pth")
    others = [c for c in COMMANDS if " train " not in c]
    assert [c.split()[1] for c in others] == ["predict"] * 3 + ["convert", "evaluate"]
    for command in others:
        words = shlex.split(command.replace("RUN", "runs/reason-quick"))
        assert main(words[1:]) == 0, capsys.readouterr().err
