"""Settings with their types, values and meanings, for help texts and `deq-zoo info`.

The meaning of a field is its sentence in the `Args:` section of its dataclass; that of an option of
the DEQ is the help text of the option.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, NamedTuple

from deq_zoo.parsing import kind_name
from deq_zoo.preset import Preset
from deq_zoo.settings import walk
from torchdeq import DEQConfig

_ENTRY = re.compile(r"( *)\*{0,2}(\w+): *(.*)")


class Setting(NamedTuple):
    """A setting.

    Args:
        path: the dotted name, for `--set`.
        kind: the type, in words.
        value: the value.
        meaning: a sentence.
        flag: the flag of an option of the DEQ, e.g. `--f_solver`.
    """

    path: str
    kind: str
    value: Any
    meaning: str
    flag: str = ""

    @property
    def shown(self) -> str:
        """Return the value as `--set` takes it."""
        return shown(self.value)


def settings(config: Any) -> Iterator[Setting]:
    """Yield the settings of a configuration.

    Those of a preset are without options that its task ignores, and without the published result.
    """
    for field in walk(config):
        if isinstance(config, Preset) and field.path.partition(".")[0] == "target":
            continue
        if isinstance(field.owner, DEQConfig):
            if isinstance(config, Preset) and field.name not in config.task.uses:
                continue
            metadata = next(f.metadata for f in fields(DEQConfig) if f.name == field.name)
            flag = f"--{metadata['flag'].get('name', field.name)}"
            meaning = metadata["help"]
        else:
            flag, meaning = "", meanings(type(field.owner)).get(field.name, "")
        yield Setting(field.path, kind_name(field.kind), field.value, meaning, flag)


def meanings(kind: type) -> dict[str, str]:
    """Return the sentence about each field of a dataclass, those of its base classes included."""
    sentences: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        doc = each.__dict__.get("__doc__")
        sentences |= read_args(doc) if doc else {}
    return sentences


def read_args(doc: str) -> dict[str, str]:
    """Return the entries of the `Args:` section of a docstring, each on one line."""
    _, _, section = inspect.cleandoc(doc).partition("Args:\n")
    entries: dict[str, str] = {}
    name, depth = "", 0
    for line in section.splitlines():
        indent = len(line) - len(line.lstrip())
        if line and not indent:
            break  # the next section
        entry = _ENTRY.fullmatch(line)
        if entry and (not depth or indent == depth):
            depth, name = indent, entry[2]
            entries[name] = entry[3]
        elif name and line.strip():
            entries[name] = f"{entries[name]} {line.strip()}".strip()
    return entries


def shown(value: Any) -> str:
    """Return a value as `--set` takes it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        inner = (f"({shown(v)})" if isinstance(v, (tuple, list)) else shown(v) for v in value)
        return ",".join(inner) or "()"
    return str(value)


def undescribed(config: Any) -> list[str]:
    """Return the paths of settings without a sentence."""
    return [setting.path for setting in settings(config) if not setting.meaning]
