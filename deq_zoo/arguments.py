"""The commands of `deq-zoo` and their arguments."""

from __future__ import annotations

import argparse
from pathlib import Path

from deq_zoo.family import families
from torchdeq import add_deq_args


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; the name of the chosen one is `args.command`."""
    parser = argparse.ArgumentParser(
        prog="deq-zoo", description="Train and use published deep equilibrium models."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    def command(name: str, help: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=help, description=help)

    listing = command("list", "List the presets.")
    listing.add_argument("family", nargs="?", help=f"one of {', '.join(families())}")
    info = command("info", "Show a preset: model, size, every setting.")
    info.add_argument("name")
    _add_settings(info)
    _add_training(command("train", "Train a preset."))
    evaluate = command("evaluate", "Evaluate a trained model.")
    predict = command("predict", "Apply a trained model to files.")
    sample = command("sample", "Generate from a trained model.")
    report = command("report", "Write the report of a run.")
    for sub in (evaluate, predict, sample, report):
        sub.add_argument("run", type=Path, help="run folder, or checkpoint file")
    for sub in (evaluate, predict, sample):
        sub.add_argument("--last", action="store_true", help="the last weights, not the best")
        _add_cpu(sub)
    _add_settings(evaluate)
    for sub in (predict, sample, report):
        sub.add_argument("--data-dir", help="folder with the data set's files, if it has moved")
    predict.add_argument("files", nargs="+", type=Path)
    predict.add_argument("--out", type=Path, help="folder for what is written")
    sample.add_argument("--out", type=Path, default=Path("samples"), help="folder for the results")
    sample.epilog = "Further options are the family's: deq-zoo sample RUN --list names them."
    sample.allow_abbrev = False
    sample.add_argument("--list", action="store_true", help="name the options of this run's family")
    _add_conversion(command("convert", "Convert weights released by the authors."))
    return parser


def _add_training(train: argparse.ArgumentParser) -> None:
    train.add_argument("name")
    train.add_argument("--out", type=Path, help="run folder (default: runs/NAME)")
    train.add_argument("--resume", action="store_true", help="go on with the run in the folder")
    train.add_argument("--force", action="store_true", help="replace the run in the folder")
    train.add_argument("--quiet", action="store_true", help="no progress")
    _add_cpu(train)
    train.add_argument("--max-seconds", type=float, help="end training after so long")
    train.add_argument("--no-report", action="store_true", help="write no report at the end")
    _add_settings(train)


def _add_conversion(convert: argparse.ArgumentParser) -> None:
    convert.add_argument("file", type=Path)
    convert.add_argument("--preset", required=True, help="the preset they belong to")
    convert.add_argument("--out", type=Path, help="file to write (default: FILE.safetensors)")
    convert.add_argument("--force", action="store_true", help="replace the file to write")
    _add_settings(convert)


def _add_cpu(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cpu", action="store_true", help="do not use an accelerator")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Add `--set`, `--data-dir` and the paper's flags, which are absent unless they are given."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting"
    )
    parser.add_argument("--data-dir", help="folder with the data set's files")
    flags = parser.add_argument_group("options of the equilibrium, as in the paper")
    add_deq_args(flags)
    for action in flags._group_actions:
        action.default = argparse.SUPPRESS
