"""Help about a preset or a run: its settings with types, values and meanings."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deq_zoo.descriptions import Setting, settings, shown
from deq_zoo.family import families
from deq_zoo.loading import open_preset
from deq_zoo.preset import Preset, find_preset
from torchdeq import add_deq_args

_USAGE = {
    "info": "deq-zoo info NAME [options]",
    "train": "deq-zoo train NAME [options]",
    "evaluate": "deq-zoo evaluate RUN [options]",
    "convert": "deq-zoo convert FILE --preset NAME [options]",
}
_DEFAULT = re.compile(r"(.*?)(?: \(default: (.*)\))?")


def add_flags(parser: argparse.ArgumentParser, preset: Preset | None = None) -> None:
    """Add the flags of the equilibrium, which are absent from the result unless they are given.

    Args:
        parser: the parser.
        preset: its values are shown in the help, and flags that it makes no use of are hidden.
    """
    group = parser.add_argument_group("options of the equilibrium, as in the paper")
    add_deq_args(group)
    used = {} if preset is None else {each.flag: each for each in settings(preset)}
    for action in group._group_actions:
        setting = used.get(action.option_strings[0])
        action.help = argparse.SUPPRESS if setting is None else _flag_help(action, setting)
        action.default = argparse.SUPPRESS


def _flag_help(action: argparse.Action, setting: Setting) -> str:
    """Return the help of a flag with the value of a preset instead of the library's default."""
    meaning, default = _DEFAULT.fullmatch(action.help or "").groups()  # type: ignore[union-attr]
    value = default if default and setting.value == action.default else setting.shown
    if isinstance(setting.value, dict):
        value = " ".join(f"{k}={shown(v)}" for k, v in setting.value.items()) or "none"
    return f"{meaning} (here: {value})".replace("%", "%%")


def describe_subject(parser: argparse.ArgumentParser, command: str, subject: str) -> None:
    """Add what is special about a preset or run to the help of a command.

    Args:
        parser: that of the command.
        command: its name.
        subject: the name of a preset, or the path of a run or checkpoint.
    """
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    if command in ("evaluate", "predict", "sample", "export"):
        name, preset = open_preset(Path(subject))
    else:
        name, preset = subject, find_preset(subject)
    family = families().get(name.partition("-")[0])
    if command == "predict":
        parser.epilog = f"{name}: {family.predicts if family else ''}"
    elif command == "sample":
        parser.epilog = f"options of {name}:\n{format_options(preset.task.sampling())}"
    elif command == "export":
        parser.epilog = f"options of {name}:\n{format_options(preset.task.exporting())}"
    else:
        add_flags(parser, preset)
        parser.usage = _USAGE[command]
        others = [each for each in settings(preset) if not each.flag]
        parser.epilog = (
            f"settings of {name}, changed by --set KEY=VALUE:\n{format_settings(others)}"
        )


def format_settings(items: Iterable[Setting]) -> str:
    """Return settings as text: name, value and type, and below them the meaning."""
    return "\n".join(
        f"  {item.path} = {item.shown}  ({item.kind}){_indent(item.meaning)}" for item in items
    )


def format_options(options: Any) -> str:
    """Return the options of sampling or exporting as flags, with defaults and meanings."""
    return "\n".join(
        f"  --{item.path.replace('_', '-')}  ({item.kind}, default: {item.shown or 'none'})"
        + _indent(item.meaning)
        for item in settings(options)
    )


def _indent(text: str) -> str:
    """Return text as indented lines that follow another line; nothing for no text."""
    width = max(40, min(100, shutil.get_terminal_size().columns))
    lines = textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "".join(f"\n{line}" for line in lines)
