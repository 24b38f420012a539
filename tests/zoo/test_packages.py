"""Optional packages: the table of families, the extras, and what happens without them."""

from __future__ import annotations

import builtins
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from deq_zoo.cli import main
from deq_zoo.errors import MissingPackage
from deq_zoo.packages import FAMILY, FRAME, missing, optional, require_family
from deq_zoo.preset import FAMILIES, find_preset
from deq_zoo.values import from_data, to_data

ROOT = Path(__file__).resolve().parents[2]
#: Distributions whose module has another name.
MODULES = {"pillow": "PIL", "scikit-image": "skimage", "scikit-learn": "sklearn"}


def extras() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: dict[str, list[str]] = project["optional-dependencies"]
    return found


def modules(extra: str) -> set[str]:
    """Modules of an extra, those of the extras it refers to among them."""
    found: set[str] = set()
    for requirement in extras()[extra]:
        inner = re.fullmatch(r"torchdeq\[([\w,]+)\]", requirement)
        if inner:
            found |= {name for part in inner[1].split(",") for name in modules(part)}
        else:
            package = re.match(r"[\w-]+", requirement)
            assert package is not None
            found.add(MODULES.get(package[0], package[0].replace("-", "_")))
    return found


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let these packages seem not to be installed."""
    find, load = importlib.util.find_spec, builtins.__import__

    def spec(name: str, package: str | None = None) -> Any:
        return None if name.split(".")[0] in names else find(name, package)

    def imported(name: str, *rest: Any, **kw: Any) -> Any:
        if name.split(".")[0] in names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return load(name, *rest, **kw)

    for name in [name for name in sys.modules if name.split(".")[0] in names]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("deq_zoo.packages.find_spec", spec)
    monkeypatch.setattr(builtins, "__import__", imported)


def test_every_family_has_an_extra_with_what_it_needs() -> None:
    assert set(FAMILY) == set(FAMILIES)
    for family, needed in FAMILY.items():
        assert {*FRAME, *needed} <= modules(family), family
        assert modules(family) <= modules("zoo")


def test_every_requirement_has_a_lower_bound() -> None:
    for extra, requirements in extras().items():
        for requirement in requirements:
            assert ">=" in requirement or requirement.startswith("torchdeq["), (extra, requirement)


def test_a_family_without_its_packages_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = to_data(find_preset("flow-smoke"))
    without(monkeypatch, "sklearn")
    assert missing("flow") == ["sklearn"]
    assert not missing("inr")
    assert not missing("elsewhere")
    require_family("inr")
    for ask in (lambda: find_preset("flow-smoke"), lambda: from_data(data)):
        with pytest.raises(MissingPackage, match=r"sklearn: pip install 'torchdeq\[flow\]'$"):
            ask()
    assert main(["info", "flow-smoke"]) == 2
    told = capsys.readouterr().err
    assert told == "deq-zoo: flow models need sklearn: pip install 'torchdeq[flow]'\n"


def test_the_list_marks_families_that_are_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without(monkeypatch, "sklearn")
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    marked = [line for line in lines if "(not installed: torchdeq[flow])" in line]
    assert marked == [line for line in lines if line.startswith("flow-")]
    assert {line.split("-")[0] for line in lines} >= set(FAMILIES)


def test_an_optional_module_names_its_extra() -> None:
    assert optional("json", "video", "videos").dumps([]) == "[]"
    with pytest.raises(
        MissingPackage, match=r"^videos need no_such: pip install 'torchdeq\[video\]'$"
    ):
        optional("no_such.part", "video", "videos")


def test_listing_presets_imports_no_heavy_package() -> None:
    heavy = [
        "accelerate", "av", "diffusers", "matplotlib", "mlxtend", "pandas", "rich", "scipy",
        "skimage", "sklearn", "tensorboard", "tokenizers", "torch_geometric", "torchmetrics",
    ]  # fmt: skip
    code = (
        "import sys; from deq_zoo.cli import main; main(['list']); "
        f"print('loaded', *[name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "loaded", done.stdout + done.stderr
