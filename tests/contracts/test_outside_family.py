"""A family of another package passes the contract of families by its entry point alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(HERE / "outside"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def test_an_installed_family_passes_the_contract() -> None:
    listed = run("deq_zoo", "list", "sums")
    assert "Sums of eight numbers" in listed.stdout, listed.stderr
    contract = str(HERE / "test_families.py")
    tested = run("pytest", "-q", "-p", "no:cacheprovider", "-k", "sums", contract)
    assert tested.returncode == 0, tested.stdout[-3000:]
    assert " passed" in tested.stdout
