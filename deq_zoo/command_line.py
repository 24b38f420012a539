"""Parsing the command line of `deq-zoo`, with help about a preset or a run.

Parsing imports torch only where it must: for the flags of the equilibrium, which `train`, `info`,
`evaluate` and `convert` take, and for the help of a preset or a run. The help of a command alone
imports nothing heavy.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NoReturn

from deq_zoo.arguments import COMMANDS, add_arguments
from deq_zoo.errors import ZooError
from deq_zoo.packages import installed_version
from deq_zoo.spelling import did_you_mean, suggest

_WITH_FLAGS = ("info", "train", "evaluate", "convert")
_OF_FAMILIES = ("sample", "export")  # commands with options that the family of a run defines
_HELP = ("-h", "--help")
_SEE_HELP = "; deq-zoo --help shows the commands"


class Parser(argparse.ArgumentParser):
    """A parser that raises `ZooError` for wrong arguments and accepts no abbreviated flags."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise the error of argparse, with the command that shows all arguments."""
        where = "" if message.endswith("?") else f"; {self.prog} --help shows the arguments"
        raise ZooError(message + where)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return the parsed arguments. `--help` and `--version` print and raise `SystemExit`.

    Beside them, `words` are the arguments as they came, `flags` those that the command knows, and
    `others` the words for options of a family, of `sample` and `export`.
    """
    command = next((word for word in argv if not word.startswith("-")), None)
    if command is not None and command not in COMMANDS:
        raise ZooError(f"unknown command {command!r}{suggest(command, COMMANDS)}")
    unknown = [word for word in argv if command is None and word not in (*_HELP, "--version")]
    if unknown:
        hint = did_you_mean(unknown[0], ("--help", "--version"))
        raise ZooError(f"unknown argument {unknown[0]!r}{hint or _SEE_HELP}")
    parser = Parser(
        prog="deq-zoo",
        description="Train and use published deep equilibrium models.",
        epilog="deq-zoo COMMAND --help shows the arguments of a command.",
    )
    parser.add_argument("--version", action="version", version=f"deq-zoo {installed_version()}")
    commands = parser.add_subparsers(
        required=True, metavar="COMMAND", dest="command", parser_class=Parser
    )
    chosen = parser
    for name, text in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text)
        if name == command:
            chosen = sub
            _add_arguments(sub, name, argv[list(argv).index(name) + 1 :])
    args, others = parser.parse_known_args(list(argv))
    args.others, args.words = others, list(argv)
    args.flags = [flag for flag in chosen._option_string_actions if flag not in _HELP]
    if others and args.command not in _OF_FAMILIES:
        flags = [word.partition("=")[0] for word in others if word.startswith("-")]
        wrong = (flags or others)[0]
        hint = did_you_mean(wrong, chosen._option_string_actions) if flags else ""
        chosen.error(f"unknown argument {wrong!r}{hint}")
    return args


def _add_arguments(parser: Parser, command: str, words: Sequence[str]) -> None:
    """Add the arguments of a command.

    Args:
        parser: that of the command.
        command: its name.
        words: the words after the command; help about a preset or run among them is specific.
    """
    add_arguments(parser, command)
    asks = any(word in _HELP for word in words)
    if command in _WITH_FLAGS and not asks:
        from deq_zoo.help import add_flags

        add_flags(parser)
    subject = _subject(command, words) if asks else None
    if subject is not None:
        from deq_zoo.help import describe_subject

        describe_subject(parser, command, subject)
    elif asks and command in _WITH_FLAGS:
        what = "RUN" if command == "evaluate" else "NAME"
        name = f"FILE --preset {what}" if command == "convert" else what
        parser.epilog = (
            f"deq-zoo {command} {name} --help shows all settings with their values, and the flags "
            "of the equilibrium, e.g. --f_solver."
        )


def _subject(command: str, words: Sequence[str]) -> str | None:
    """Return the preset or run that the help is about: the first word, or that after `--preset`."""
    words = [part for word in words for part in word.split("=", 1)]
    if command == "convert":
        return next((b for a, b in pairwise(words) if a == "--preset"), None)
    if command in ("list", "report", "doctor", "serve"):
        return None
    first = next((word for word in words if word not in _HELP), "-")
    return None if first.startswith("-") else first
