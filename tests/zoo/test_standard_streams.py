"""Output that nobody reads, that does not fit or cannot be encoded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "deq_zoo"]


def run(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    environment = {**os.environ, **options.pop("env", {})}
    return subprocess.run(
        [*COMMAND, *words], cwd=ROOT, text=True, env=environment, timeout=120, **options
    )


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["list", "lm"]])
def test_a_reader_that_has_gone_causes_no_complaint(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run(*words, stdout=writer)
    finally:
        os.close(writer)
    assert done.stderr == ""
    assert done.returncode == (1 if words[0] == "list" else 0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no full device")
def test_a_full_disk_is_an_error_of_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = run("list", "lm", stdout=full)
    assert done.returncode == 2
    assert done.stderr.startswith("deq-zoo: ")
    assert done.stderr.count("\n") == 1


def test_a_closed_output_is_no_error() -> None:
    code = "import os, sys; os.close(1); os.execv(sys.argv[1], sys.argv[1:])"
    words = [sys.executable, "-c", code, *COMMAND, "list", "lm"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_name_that_cannot_be_encoded_is_escaped() -> None:
    done = run("list", "\udcff\u00fc", env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1"})
    assert done.returncode == 2
    assert "unknown family" in done.stderr
    assert "Traceback" not in done.stderr
