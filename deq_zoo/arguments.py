"""The commands of `deq-zoo` and their arguments.

Parsing imports torch only where it must: for the flags of the equilibrium, which `train`, `info`,
`evaluate` and `convert` take, and for the help of a preset or a run. The help of a command alone
imports nothing heavy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from deq_zoo.errors import ZooError
from deq_zoo.family import families
from deq_zoo.spelling import did_you_mean, suggest

COMMANDS = {
    "list": "List the presets.",
    "info": "Show a preset: model, size, published result, every setting.",
    "train": "Train a preset.",
    "evaluate": "Evaluate a trained model.",
    "predict": "Apply a trained model to files.",
    "sample": "Generate from a trained model.",
    "report": "Write the report of a run.",
    "convert": "Convert weights that the authors released, or weights of ours to their layout.",
}
_WITH_FLAGS = ("info", "train", "evaluate", "convert")
_HELP = ("-h", "--help")


class Parser(argparse.ArgumentParser):
    """A parser that raises `ZooError` for wrong arguments and accepts no abbreviated flags."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise the error of argparse, with the command that shows all arguments."""
        where = "" if message.endswith("?") else f"; {self.prog} --help shows the arguments"
        raise ZooError(message + where)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return the parsed arguments; `command` is the command, `others` are options of sampling.

    `--help` and `--version` print and raise `SystemExit`.
    """
    command = next((word for word in argv if not word.startswith("-")), None)
    if command is not None and command not in COMMANDS:
        raise ZooError(f"unknown command {command!r}{suggest(command, COMMANDS)}")
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
    args.others = others
    if others and args.command != "sample":
        flags = [word.partition("=")[0] for word in others if word.startswith("-")]
        wrong = (flags or others)[0]
        hint = did_you_mean(wrong, chosen._option_string_actions) if flags else ""
        chosen.error(f"unknown argument {wrong!r}{hint}")
    return args


def installed_version() -> str:
    """Return the version of the installed package."""
    try:
        return version("torchdeq")
    except PackageNotFoundError:
        return "unknown (not installed)"


def _add_arguments(parser: Parser, command: str, words: Sequence[str]) -> None:
    """Add the arguments of a command.

    Args:
        parser: that of the command.
        command: its name.
        words: the words after the command; help about a preset or run among them is specific.
    """
    _ADD[command](parser)
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
    if command in ("list", "report"):
        return None
    return words[0] if words and not words[0].startswith("-") else None


def _add_list(parser: Parser) -> None:
    parser.add_argument("family", nargs="?", help=f"one of {', '.join(families())}")
    _add_json(parser)


def _add_info(parser: Parser) -> None:
    parser.add_argument("name", help="preset")
    _add_json(parser)
    _add_settings(parser)


def _add_train(parser: Parser) -> None:
    add = parser.add_argument
    add("name", help="preset")
    add("--out", type=Path, metavar="FOLDER", help="run folder (default: runs/NAME)")
    add("--resume", action="store_true", help="continue the run in the folder")
    add("--force", action="store_true", help="replace the run in the folder")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=whole, metavar="N", help="short for --set epochs=N")
    length.add_argument("--steps", type=whole, metavar="N", help="short for --set steps=N")
    add("--seed", type=whole, metavar="N", help="short for --set seed=N")
    add("--workers", type=whole, metavar="N", help="short for --set workers=N")
    add("--max-seconds", type=positive, metavar="S", help="stop after S seconds, with a checkpoint")
    add("--quiet", action="store_true", help="show no progress")
    add("--no-report", action="store_true", help="write no report at the end")
    _add_cpu(parser)
    _add_settings(parser)


def _add_evaluate(parser: Parser) -> None:
    _add_run(parser)
    parser.add_argument(
        "--split", type=split, default="test", metavar="val|test", help="data (default: test)"
    )
    _add_json(parser)
    _add_settings(parser)


def _add_predict(parser: Parser) -> None:
    _add_run(parser)
    parser.add_argument("files", nargs="+", type=Path, help="inputs")
    _add_output(parser, "predictions")
    parser.epilog = _uses("predicts")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def _add_sample(parser: Parser) -> None:
    _add_run(parser)
    _add_output(parser, "samples")
    parser.add_argument("--list", action="store_true", help="list the options of this run's family")
    parser.epilog = f"{_uses('samples')}\n\ndeq-zoo sample RUN --help shows the family's options."
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def _add_report(parser: Parser) -> None:
    parser.add_argument("run", type=Path, help="run folder")
    _add_data_dir(parser)


def _add_convert(parser: Parser) -> None:
    add = parser.add_argument
    add("file", type=Path, help="file of the authors; with --to-authors, a run or checkpoint")
    add("--preset", metavar="NAME", help="preset that the authors' weights belong to")
    add("--to-authors", action="store_true", help="write weights of ours as the authors' programs "
        "read them, to --out FILE.safetensors or FILE.pth")  # fmt: skip
    add("--out", type=Path, metavar="FILE", help="file to write (default: FILE.safetensors)")
    add("--key", metavar="KEY", help="where in the file the weights are, e.g. ema")
    add("--last", action="store_true", help="with --to-authors: the last weights, not the best")
    add("--force", action="store_true", help="replace the file to write")
    _add_settings(parser)


_ADD: dict[str, Callable[[Parser], None]] = {
    "list": _add_list,
    "info": _add_info,
    "train": _add_train,
    "evaluate": _add_evaluate,
    "predict": _add_predict,
    "sample": _add_sample,
    "report": _add_report,
    "convert": _add_convert,
}


def _add_run(parser: Parser) -> None:
    parser.add_argument("run", type=Path, help="run folder, or checkpoint file")
    parser.add_argument("--last", action="store_true", help="the last weights, not the best")
    _add_cpu(parser)
    if parser.prog.split()[-1] != "evaluate":
        _add_data_dir(parser)


def _add_output(parser: Parser, folder: str) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help=f"folder for files (default: {folder}); if given, {folder}.jsonl in it lists all "
        "results",
    )
    parser.add_argument("--force", action="store_true", help="replace files in the folder")
    _add_json(parser)


def _add_json(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def _add_cpu(parser: Parser) -> None:
    parser.add_argument("--cpu", action="store_true", help="do not use an accelerator")


def _add_data_dir(parser: Parser) -> None:
    parser.add_argument("--data-dir", metavar="FOLDER", help="folder with the data set's files")


def _add_settings(parser: Parser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting"
    )
    _add_data_dir(parser)


def _uses(field: str) -> str:
    """Return what the families predict or sample, a line each."""
    lines = [(name, getattr(family, field)) for name, family in families().items()]
    return "\n".join(f"{name}: {text}" for name, text in lines if text)


def whole(text: str) -> int:
    """Return text as a whole number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"takes a whole number, got {text!r}")
    return int(text)


def positive(text: str) -> float:
    """Return text as a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not number > 0:
        raise argparse.ArgumentTypeError(f"takes a number above 0, got {text!r}")
    return number


def split(text: str) -> str:
    """Return the name of a split."""
    if text not in ("val", "test"):
        hint = did_you_mean(text, ("val", "test"))
        raise argparse.ArgumentTypeError(f"is val or test, got {text!r}{hint}")
    return text
