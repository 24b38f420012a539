"""Where numbers come from: the command, the commit, the seeds and the kind of machine.

Every file in `results/` has this record under `provenance`, once or in each of its parts. It names
no host, and has PATH in the place of every argument with a slash. Records that are older than this
module have the commit that brought the numbers into the repository. Commits that were joined into
another one keep their name here, with that one beside it in `JOINED`.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch

ROOT = Path(__file__).resolve().parents[1]
CHANGED = "with changes"
#: Commits that the history no longer has, with the one that now holds their changes.
JOINED = dict.fromkeys(
    (
        "0fdb343", "1a762d4", "218bc0f", "80fbcb0", "907848e",
        "90af82f", "a927de3", "af5cc8b", "b8dd572", "c344f75",
    ),
    "2722f7a",
)  # fmt: skip
#: What a benchmark writes or renews without changing what it measures.
_OUTPUTS = (":!benchmarks/results", ":!docs", ":!*.md")


class Provenance(TypedDict):
    """What is written beside numbers; None stands for what is not known.

    Numbers of papers (`results/published.json`) have a `source` besides, and no machine.

    Attributes:
        command: as typed, with PATH for every argument with a slash; several, with `and`, if a
            later run with other arguments continued an earlier one.
        commit: of the code; several, with commas, if a later run continued an earlier one.
        seeds: of the random numbers; an empty list where there are none.
        torch: its version.
        threads: of torch, in one process.
        machine: processor, number of cores and accelerator; several, with `and`, if a later run on
            another machine continued an earlier one.
    """

    command: str | None
    commit: str | None
    seeds: list[int] | None
    torch: str | None
    threads: int | None
    machine: str | None


def provenance(seeds: Sequence[int] | None, threads: int | None = None) -> Provenance:
    """Return the record of the running program.

    Args:
        seeds: of the random numbers that the results depend on.
        threads: of the processes that measure; None takes those of this process.
    """
    return Provenance(
        command=command(),
        commit=_AT_START,
        seeds=None if seeds is None else sorted(set(seeds)),
        torch=torch.__version__,
        threads=torch.get_num_threads() if threads is None else threads,
        machine=machine(),
    )


def continued(now: Provenance, earlier: Any) -> Provenance:
    """Return the record of rows of which an earlier run has made a part."""
    before = (earlier or {}).get("commit")
    names = [*(before.split(", ") if before else ["unknown"]), now["commit"] or "unknown"]
    return {
        **now,
        "commit": ", ".join(dict.fromkeys(names)),
        "command": _both((earlier or {}).get("command"), now["command"]),
        "machine": _both((earlier or {}).get("machine"), now["machine"]),
    }


def _both(earlier: str | None, now: str | None) -> str | None:
    """Return names that are joined by `and`, each once."""
    names = [*(earlier or "").split(" and "), now]
    return " and ".join(dict.fromkeys(name for name in names if name)) or None


def command() -> str:
    """Return the command of this process, with PATH in the place of paths with a slash."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = spec.name.removesuffix(".__main__") if spec else Path(sys.argv[0]).stem
    return " ".join(["python -m", module, *(_without_path(each) for each in sys.argv[1:])])


def _without_path(argument: str) -> str:
    name, equals, value = argument.rpartition("=")
    return f"{name}{equals}PATH" if re.search(r"[/\\~]", value) else argument


def commit(root: Path = ROOT) -> str | None:
    """Return the commit, and whether its files were changed; None outside of a clone."""
    if not (root / ".git").exists():  # the package may be a part of somebody else's clone
        return None
    try:
        name = _git(root, "rev-parse", "--short=7", "HEAD")
        changes = _git(root, "status", "--porcelain", "-uall", "--", ".", *_OUTPUTS)
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{name} {CHANGED}" if any(map(_is_code, changes.splitlines())) else name


def _is_code(change: str) -> bool:
    """Return whether a line of `git status` is of a known file, or of a new program."""
    return not change.startswith("??") or change.rstrip('"').endswith(".py")


def refuse_changes() -> None:
    """Raise SystemExit if the running code is in no commit: its results could not be checked."""
    if _AT_START is not None and _AT_START.endswith(CHANGED):
        raise SystemExit(
            "the code differs from its commit, so nobody could repeat what it measures: commit "
            "first, or try it out with --small, whose results are not kept"
        )


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


_AT_START = commit()  # a long run may see later commits, which it does not measure


def machine() -> str:
    """Return the processor, the number of its cores, and the accelerator."""
    device = torch.accelerator.current_accelerator(check_available=True)
    kind = "no accelerator" if device is None else device.type
    if kind == "cuda":
        kind = torch.cuda.get_device_name()
    return f"{_processor()}, {os.cpu_count()} cores, {kind}"


def _processor() -> str:
    """Return the model name of the processor, or its architecture where Linux does not tell."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()
