"""Errors name what the caller can change: arguments in Python, flags on the command line."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

import deq_zoo
from deq_zoo.cli import main
from deq_zoo.errors import DataError, ZooError
from deq_zoo.python_errors import naming_arguments


def test_a_folder_in_the_way_is_answered_in_the_words_of_the_caller(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    common: dict[str, Any] = {"out": out, "quiet": True, "report": False, "cpu": True}
    deq_zoo.train("toy", steps=1, **common)
    with pytest.raises(ZooError) as caught:
        deq_zoo.train("toy", **common)
    assert str(caught.value) == (
        f"{out} exists already: go on with resume=True, choose another folder with out=... or "
        "replace it with force=True"
    )
    assert main(["train", "toy", "--out", str(out)]) == 2
    assert "go on with --resume, choose another folder with --out or" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        ("name the folder by --data-dir FOLDER", "name the folder by data_dir=..."),
        ("lower it (--set lr=...) or damp (--tau)", "lower it (lr=...) or damp (tau=...)"),
        ("use --cpu, --set net.tokens=40; a--b", "use cpu=True, net.tokens=40; a--b"),
        ("a range 1--2 -- and a dash", "a range 1--2 -- and a dash"),
    ],
)
def test_flags_become_arguments(flags: str, arguments: str) -> None:
    with pytest.raises(DataError) as caught, naming_arguments():
        raise DataError(flags)
    assert str(caught.value) == arguments


def test_wrapped_functions_keep_their_signatures() -> None:
    assert "max_seconds" in inspect.signature(deq_zoo.train).parameters
    assert deq_zoo.fit.__doc__
