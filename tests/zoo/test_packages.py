"""Optional packages: the table of families, the extras, and what happens without them."""

from __future__ import annotations

import builtins
import importlib.util
import re
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from deq_zoo.arguments import COMMANDS
from deq_zoo.cli import main
from deq_zoo.errors import MissingPackage
from deq_zoo.family import (
    GROUP,
    Family,
    _installed,
    families,
    find_family,
    preset_summaries,
    register_family,
)
from deq_zoo.packages import FRAME, install, missing, optional, require_family
from deq_zoo.preset import PRESETS, find_preset, load_presets
from deq_zoo.values import from_data, to_data
from torchdeq import __version__

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = [name for name, family in families().items() if family.package == "deq_zoo"]
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
    for name in FAMILIES:
        family = find_family(name)
        assert {*FRAME, *family.packages} <= modules(name), name
        assert modules(name) <= modules("zoo")
        assert family.install == install(name)


def test_the_command_names_the_clone_from_any_folder_and_outside_of_a_clone_the_wheel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    assert install("serve") == "pip install -e '.[serve]'"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").touch()  # of another project
    assert install("serve") == f"pip install -e '{ROOT}[serve]'"
    monkeypatch.setattr("deq_zoo.packages._ROOT", tmp_path / "site-packages")
    wheel = f"dist/torchdeq-{__version__}-py3-none-any.whl"
    assert install("serve") == f"pip install '{wheel}[serve]'"


def test_every_requirement_has_a_lower_bound() -> None:
    for extra, requirements in extras().items():
        for requirement in requirements:
            assert ">=" in requirement or requirement.startswith("torchdeq["), (extra, requirement)


def test_a_family_without_its_packages_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = to_data(find_preset("mdeq-smoke"))
    without(monkeypatch, "mlxtend")
    assert missing(find_family("mdeq")) == ["mlxtend"]
    assert not missing(find_family("inr"))
    require_family(find_family("inr"))
    for ask in (lambda: find_preset("mdeq-smoke"), lambda: from_data(data)):
        with pytest.raises(MissingPackage, match=r"mlxtend: pip install -e '.*\[mdeq\]'$"):
            ask()
    assert main(["info", "mdeq-smoke"]) == 2
    message = capsys.readouterr().err
    assert message == f"deq-zoo: mdeq models need mlxtend: {install('mdeq')}\n"


def test_the_list_marks_families_that_are_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without(monkeypatch, "sklearn")
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    mark = f"(not installed: sklearn: {install('flow')})"
    marked = [line for line in lines if mark in line]
    assert marked == [line for line in lines if line.startswith("flow-")]
    assert {line.split("-")[0] for line in lines} >= set(FAMILIES)


def test_an_optional_module_names_its_extra() -> None:
    assert optional("json", "video", "videos").dumps([]) == "[]"
    with pytest.raises(
        MissingPackage, match=r"^videos need no_such: pip install -e '.*\[video\]'$"
    ):
        optional("no_such.part", "video", "videos")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_list_reads_from_source_what_importing_would_register(name: str) -> None:
    load_presets(find_family(name))
    lines = {
        preset: (PRESETS[preset].__doc__ or "").partition("\n")[0]
        for preset in PRESETS
        if preset.partition("-")[0] == name
    }
    assert preset_summaries(find_family(name)) == lines


def test_presets_that_are_registered_in_another_way_are_left_to_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = '@PRESETS.register("odd-a")\ndef a():\n    """One."""\n'
    module = tmp_path / "odd_presets.py"
    monkeypatch.syspath_prepend(tmp_path)
    family = Family(name="odd", description="Odd.", presets="odd_presets", tasks=())
    module.write_text(source)
    assert preset_summaries(family) == {"odd-a": "One."}
    module.write_text(source + 'PRESETS.register("odd-b", a)\n')
    assert preset_summaries(family) == {}
    module.write_text("not python")
    assert preset_summaries(family) == {}


@pytest.mark.parametrize("words", ["--help", "--version", "list", "list lm --json",
                                   *(f"{command} --help" for command in COMMANDS)])  # fmt: skip
def test_listing_and_help_import_no_heavy_package(words: str) -> None:
    heavy = ["accelerate", "huggingface_hub", "matplotlib", "numpy", "rich"]
    heavy += ["safetensors", "torch", "torchdeq"]
    code = (
        "import sys, atexit; from deq_zoo.cli import main;"
        f"atexit.register(lambda: print('loaded', *[m for m in {heavy} if m in sys.modules]));"
        f"sys.exit(main({words.split()}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "loaded", done.stdout + done.stderr


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deq_zoo", "--version"], capture_output=True, text=True, cwd=ROOT
    )
    assert re.fullmatch(r"deq-zoo \S.*\n", done.stdout)


def outside_family(folder: Path) -> Family:
    """Write a package with a family of one preset, and return its declaration."""
    package = folder / "outside_zoo"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "presets.py").write_text(
        "from deq_zoo.preset import PRESETS\n"
        '@PRESETS.register("outside-smoke")\ndef outside_smoke():\n    """From elsewhere."""\n'
    )
    return Family(
        name="outside",
        description="Models of another package.",
        presets="outside_zoo.presets",
        tasks=(),
        packages=("no_such_module",),
    )


def test_families_of_other_packages_are_listed_and_broken_ones_are_not(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("deq_zoo.family._registered", {})
    register_family(outside_family(tmp_path))
    points = [EntryPoint("broken", "no_such_package:FAMILY", GROUP)]
    monkeypatch.setattr("deq_zoo.family.entry_points", lambda group: points)
    _installed.cache_clear()
    try:
        assert main(["list"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert main(["train", "outside-smoke"]) == 2
        assert "outside models need no_such_module" in capsys.readouterr().err
    finally:
        _installed.cache_clear()
    (line,) = [line for line in lines if line.startswith("outside-")]
    assert line.split() == [
        "outside-smoke",
        "From",
        "elsewhere.",
        "(not",
        "installed:",
        "no_such_module)",
    ]
    assert "mdeq-smoke" in " ".join(lines)
    assert "'broken' of no_such_package:FAMILY cannot be loaded" in caplog.text
