"""One trained model for all tests of the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from deq_zoo.cli import main


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of `mdeq-smoke`."""
    pytest.importorskip("fastapi", reason="the extra serve is not installed")
    out = tmp_path_factory.mktemp("serving") / "run"
    assert main(["train", "mdeq-smoke", "--cpu", "--quiet", "--no-report", "--out", str(out)]) == 0
    return out
