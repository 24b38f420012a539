"""The commands of `deq-zoo`, and the arguments that each of them takes."""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from pathlib import Path

from deq_zoo.argument_types import at_least_one, positive, split, whole
from deq_zoo.family import families
from deq_zoo.pretrained import as_source

COMMANDS = {
    "list": "List the presets, or the pretrained models.",
    "info": "Show a preset: model, size, published result, every setting.",
    "train": "Train a preset.",
    "evaluate": "Evaluate a trained model.",
    "predict": "Apply a trained model to files.",
    "sample": "Generate from a trained model.",
    "serve": "Serve a trained model over HTTP.",
    "report": "Write the report of a run.",
    "export": "Write a trained model for other programs: torch.export, ONNX or AOTInductor.",
    "doctor": "Examine the solves of a trained model: what is wrong, which options are best.",
    "convert": "Convert weights that the authors released, or weights of ours to their layout.",
}
_RUN = (
    "run folder, saved model, checkpoint file, or name of a pretrained model "
    "(deq-zoo list --pretrained)"
)


def add_arguments(parser: ArgumentParser, command: str) -> None:
    """Add the arguments of a command to its parser, without the flags of the equilibrium."""
    _ADD[command](parser)


def _add_list(parser: ArgumentParser) -> None:
    parser.add_argument("family", nargs="?", help=f"one of {', '.join(families())}")
    parser.add_argument("--pretrained", action="store_true", help="list the pretrained models")
    _add_json(parser)


def _add_info(parser: ArgumentParser) -> None:
    parser.add_argument("name", help="preset")
    _add_json(parser)
    _add_settings(parser)


def _add_train(parser: ArgumentParser) -> None:
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
    add("--max-seconds", type=positive, metavar="S", help="stop after the step or the "
        "evaluation that reaches S seconds, with a checkpoint")  # fmt: skip
    add("--launch", type=at_least_one, metavar="N", help="train with N processes on this machine")
    add("--quiet", action="store_true", help="show no progress")
    add("--no-report", action="store_true", help="write no report at the end")
    add("--json", action="store_true", help="print the result alone, as JSON, for programs")
    _add_cpu(parser)
    _add_settings(parser)


def _add_evaluate(parser: ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument(
        "--split", type=split, default="test", metavar="val|test", help="data (default: test)"
    )
    _add_json(parser)
    _add_settings(parser)


def _add_predict(parser: ArgumentParser) -> None:
    _add_run(parser)
    _add_data_dir(parser)
    parser.add_argument("files", nargs="+", type=Path, help="inputs")
    _add_output(parser, "predictions")
    parser.epilog = _uses("predicts")
    parser.formatter_class = RawDescriptionHelpFormatter


def _add_sample(parser: ArgumentParser) -> None:
    _add_run(parser)
    _add_data_dir(parser)
    _add_output(parser, "samples")
    parser.add_argument("--list", action="store_true", help="list the options of this run's family")
    parser.epilog = f"{_uses('samples')}\n\ndeq-zoo sample RUN --help shows the family's options."
    parser.formatter_class = RawDescriptionHelpFormatter


def _add_serve(parser: ArgumentParser) -> None:
    _add_run(parser)
    _add_data_dir(parser)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    add("--port", type=whole, default=8000, metavar="N", help="port; 0 chooses (default: 8000)")
    add("--slots", type=at_least_one, default=32, metavar="N",
        help="requests that a stream solves at the same time (default: 32)")  # fmt: skip
    add("--queue", type=whole, default=64, metavar="N", help="requests that may wait (default: 64)")
    add("--max-bytes", type=at_least_one, default=10_000_000, metavar="N",
        help="size of a request (default: 10,000,000)")  # fmt: skip
    add("--time-limit", type=positive, default=30.0, metavar="S",
        help="seconds for a request, its upload included (default: 30)")  # fmt: skip


def _add_report(parser: ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="run folder")
    _add_data_dir(parser)
    _add_json(parser)


def _add_export(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("run", type=as_source, help=_RUN)
    add("--format", choices=("pt2", "onnx", "aoti"), default="pt2", help="pt2: a program of "
        "torch.export (default); onnx: for onnxruntime; aoti: compiled, for C++")  # fmt: skip
    add("--out", type=Path, metavar="FILE", help="file to write (default: model.FORMAT in the "
        "folder of the run, or NAME.FORMAT for a pretrained model); "
        "FILE.json describes inputs and outputs")  # fmt: skip
    add("--solver", metavar="NAME", help="solver instead of that of the run")
    add("--last", action="store_true", help="the last weights, not the best")
    add("--force", action="store_true", help="replace the file to write")
    add("--list", action="store_true", help="list the options of this run's family")
    _add_data_dir(parser)
    parser.epilog = "deq-zoo export RUN --help shows the family's options."


def _add_doctor(parser: ArgumentParser) -> None:
    _add_run(parser)
    _add_data_dir(parser)
    add = parser.add_argument
    add("--seconds", type=positive, default=30.0, metavar="S", help="time limit (default: 30)")
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="write pictures and doctor.jsonl into this folder",
    )
    add("--force", action="store_true", help="replace files in the folder")
    _add_json(parser)


def _add_convert(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("file", type=as_source, help="file of the authors; with --to-authors, a run or checkpoint")
    add("--preset", metavar="NAME", help="preset that the authors' weights belong to")
    add("--to-authors", action="store_true", help="write weights of ours as the authors' programs "
        "read them, to --out FILE.safetensors or FILE.pth")  # fmt: skip
    add("--out", type=Path, metavar="FILE", help="file to write (default: FILE.safetensors)")
    add("--key", metavar="KEY", help="where in the file the weights are, e.g. ema")
    add("--last", action="store_true", help="with --to-authors: the last weights, not the best")
    add("--force", action="store_true", help="replace the file to write")
    _add_json(parser)
    _add_settings(parser)


_ADD: dict[str, Callable[[ArgumentParser], None]] = {
    "list": _add_list,
    "info": _add_info,
    "train": _add_train,
    "evaluate": _add_evaluate,
    "predict": _add_predict,
    "sample": _add_sample,
    "serve": _add_serve,
    "report": _add_report,
    "export": _add_export,
    "doctor": _add_doctor,
    "convert": _add_convert,
}


def _add_run(parser: ArgumentParser) -> None:
    parser.add_argument("run", type=as_source, help=_RUN)
    parser.add_argument("--last", action="store_true", help="the last weights, not the best")
    _add_cpu(parser)


def _add_output(parser: ArgumentParser, folder: str) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help=f"folder for files (default: {folder}); if given, {folder}.jsonl in it lists all "
        "results",
    )
    parser.add_argument("--force", action="store_true", help="replace files in the folder")
    _add_json(parser)


def _add_json(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def _add_cpu(parser: ArgumentParser) -> None:
    parser.add_argument("--cpu", action="store_true", help="do not use an accelerator")


def _add_data_dir(parser: ArgumentParser) -> None:
    parser.add_argument("--data-dir", metavar="FOLDER", help="folder with the data set's files")


def _add_settings(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting"
    )
    _add_data_dir(parser)


def _uses(field: str) -> str:
    """Return what the families predict or sample, a line each."""
    lines = [(name, getattr(family, field)) for name, family in families().items()]
    return "\n".join(f"{name}: {text}" for name, text in lines if text)
