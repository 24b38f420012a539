"""The tests of the library need no package of the zoo."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: What an environment for the library alone may have beside torch: `test-torch` in the Makefile.
INSTALLED = {"hypothesis", "numpy", "pytest", "pytest-cov", "pytest-xdist", "scipy"}


def optional_modules() -> list[str]:
    """Return the import names of the packages that extras bring."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = {re.split(r"[\[<>=;]", line)[0] for lines in extras.values() for line in lines}
    optional = {name.lower().replace("_", "-") for name in names} - INSTALLED - {"torchdeq"}
    return sorted(
        module
        for module, owners in packages_distributions().items()
        if any(owner.lower().replace("_", "-") in optional for owner in owners)
    )


@pytest.mark.slow
def test_they_are_collected_without_any_of_them() -> None:
    hidden = dict.fromkeys(optional_modules())
    assert "safetensors" in hidden
    program = (
        f"import sys; sys.modules.update({hidden!r}); import pytest; "
        "sys.exit(pytest.main(['--collect-only', '-q', '-p', 'no:cacheprovider', 'tests']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "tests/solver" in done.stdout
    assert "tests/zoo" not in done.stdout
