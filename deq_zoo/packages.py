"""Optional packages: which are missing, and errors that say what to install.

An extra of `pyproject.toml` has the name of its family: `pip install -e '.[flow]'` in a clone. The
package index has the name `torchdeq` for another package, so no command here uses the name alone.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any

from deq_zoo.errors import MissingPackage
from deq_zoo.family import Family

#: Modules that the commands need, whatever the family.
FRAME = ("accelerate", "matplotlib", "numpy", "PIL", "rich", "safetensors")
_ROOT = Path(__file__).resolve().parents[1]  # of a clone, or of installed packages


def missing(family: Family) -> list[str]:
    """Return the modules that a family needs and that are not installed."""
    return [name for name in (*FRAME, *family.packages) if find_spec(name) is None]


def require_family(family: Family) -> None:
    """Raise `MissingPackage` unless all modules of a family are installed."""
    lacking = missing(family)
    if lacking:
        how = f": {family.install}" if family.install else ""
        raise MissingPackage(f"{family.name} models need {', '.join(lacking)}{how}")


def optional(module: str, extra: str, purpose: str) -> Any:
    """Import a module, or raise `MissingPackage` with the command that installs it.

    Args:
        module: the name of the module.
        extra: the extra of `pyproject.toml` that installs it.
        purpose: what needs the module: the subject of the error's sentence, in the plural.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        reason = "" if isinstance(error, ModuleNotFoundError) else f" ({error})"
        raise MissingPackage(f"{purpose} need {package}: {install(extra)}{reason}") from None


def install(extra: str) -> str:
    """Return the command that installs an extra of this project: of the clone, or of its wheel."""
    project, here = _ROOT / "pyproject.toml", Path("pyproject.toml")
    if not project.is_file():
        return f"pip install 'dist/torchdeq-{installed_version()}-py3-none-any.whl[{extra}]'"
    place = "." if here.is_file() and here.samefile(project) else _ROOT
    return f"pip install -e '{place}[{extra}]'"


@cache
def installed_version() -> str:
    """Return the version of the library, without importing it: that would import torch."""
    package = find_spec("torchdeq")
    assert package is not None
    assert package.origin is not None
    values = run_path(str(Path(package.origin).with_name("_version.py")))
    return str(values["__version__"])
