"""Optional packages: which are missing, and errors that say what to install.

An extra of `pyproject.toml` has the name of its family: `pip install 'torchdeq[flow]'`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from deq_zoo.errors import MissingPackage
from deq_zoo.family import Family

#: Modules that the commands need, whatever the family.
FRAME = ("accelerate", "matplotlib", "numpy", "PIL", "rich", "safetensors")


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
    """Return the command that installs an extra."""
    return f"pip install 'torchdeq[{extra}]'"
