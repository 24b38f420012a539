"""The command line, `deq-zoo COMMAND`.

Exit codes: 0, or 1 if `predict` or `sample` failed for some inputs, or 2 for a mistake of the user,
or 128 plus the number of the signal that interrupted a training. Modules that need torch are
imported by the commands that use them, so that `list` and `--help` are quick.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deq_zoo.arguments import parse_arguments
from deq_zoo.errors import ZooError
from deq_zoo.packages import install
from deq_zoo.predictions import OutFolder
from deq_zoo.spelling import suggest

if TYPE_CHECKING:
    from deq_zoo.model import Model
    from deq_zoo.preset import Preset

_NEEDS = f"needs packages of the zoo: {install('zoo')}, or the extra of one family"
_SAMPLE_FLAGS = {"--cpu", "--data-dir", "--force", "--json", "--last", "--list", "--out"}
_SHORT = ("epochs", "steps", "seed", "workers")  # settings of a preset with flags of their own


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; print a mistake of the user as one paragraph."""
    try:
        args = parse_arguments(sys.argv[1:] if argv is None else argv)
        return int(_COMMANDS[args.command](args) or 0)
    except ZooError as error:
        print(f"deq-zoo: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("deq_zoo", "torchdeq"):
            raise
        print(f"deq-zoo: {error.name} is not installed; this command {_NEEDS}", file=sys.stderr)
    except BrokenPipeError:  # the reader of our output has gone
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return 1
    except OSError as error:
        print(f"deq-zoo: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("deq-zoo: interrupted", file=sys.stderr)
        return 130
    return 2


def _list(args: argparse.Namespace) -> None:
    from deq_zoo.catalogue import entries

    listed = entries(args.family)
    if args.json:
        print(json.dumps([entry._asdict() for entry in listed], indent=1))
        return
    for entry in listed:
        print(entry)


def _info(args: argparse.Namespace) -> None:
    from deq_zoo.catalogue import describe_preset, preset_info
    from deq_zoo.preset import find_preset

    preset = _with_changes(find_preset(args.name), args)
    if args.json:
        print(json.dumps(preset_info(args.name, preset), indent=1))
        return
    for line in describe_preset(args.name, preset):
        print(line)


def _with_changes(preset: Preset, args: argparse.Namespace) -> Preset:
    """Return a preset with the changes of the command line."""
    from deq_zoo.settings import change_preset
    from torchdeq import DEQConfig

    given = vars(args)
    flags = {name: value for name, value in given.items() if name in DEQConfig.names()}
    short = [f"{name}={given[name]}" for name in _SHORT if given.get(name) is not None]
    where = "deq-zoo info NAME shows all"
    return change_preset(preset, [*args.set, *short], flags, args.data_dir, where)


def _train(args: argparse.Namespace) -> int:
    from deq_zoo.training import train_changed

    result = train_changed(
        args.name,
        lambda preset: _with_changes(preset, args),
        out=args.out,
        resume=args.resume,
        force=args.force,
        quiet=args.quiet,
        cpu=args.cpu,
        max_seconds=args.max_seconds,
        report=not args.no_report,
    )
    if not result.main:
        return 0
    if not result.finished:
        print(
            f"stopped at step {result.step} of {result.steps}; --resume goes on from "
            f"{result.run.path}"
        )
        if result.interrupted:
            return 128 + result.interrupted
    _print_result(result.run.preset(), result.metrics, result.run)
    return 0


def _print_result(preset: Preset, metrics: dict[str, float], run: Any) -> None:
    if not sys.stdout.isatty():
        print(json.dumps({"run": str(run.path), **metrics}))
        return
    for name, value in metrics.items():
        print(f"{name}: {value:.4g}")
    if preset.target is not None:
        print(f"published {preset.target.metric}: {preset.target.value} ({preset.target.source})")
    print(f"run: {run.path}" + (f", report: {run.report}" if run.report.exists() else ""))


def _open(args: argparse.Namespace) -> tuple[Model, Preset]:
    """Return the model that the command line names, on its device, and its preset."""
    import torch

    from deq_zoo.loading import open_model

    if args.last and args.run.is_file():
        raise ZooError(f"--last chooses a checkpoint of a run folder, and {args.run} is a file")
    model, preset = open_model(args.run, best=not args.last, data_dir=args.data_dir)
    accelerator = None if args.cpu else torch.accelerator.current_accelerator(check_available=True)
    return model.to(torch.device("cpu") if accelerator is None else accelerator), preset


def _evaluate(args: argparse.Namespace) -> None:
    from deq_zoo.building import try_to_build
    from deq_zoo.evaluate import evaluate
    from deq_zoo.log import as_json
    from deq_zoo.printing import describe_evaluation, evaluation_as_data
    from deq_zoo.uses import STATES
    from deq_zoo.weights import load_weights

    idle = sorted(name for name in STATES if name in vars(args))
    if idle:
        raise ZooError(f"{', '.join(idle)} would have no effect: they are options of training")
    trained, preset = _open(args)
    changed, model = _with_changes(preset, args), trained
    if changed != preset:
        model = try_to_build(changed, trained.facts or None).to(trained.device)
        load_weights(model, trained.state_dict(), str(args.run))
        model.facts = trained.facts
    if args.split == "val" and changed.task.val_set is None:
        raise ZooError(f"{args.run} has no validation data: use --split test")
    evaluation = evaluate(changed.task, model, args.split, thorough=True)
    if args.json:
        print(as_json(evaluation_as_data(evaluation, args.split)))
        return
    for line in describe_evaluation(evaluation, changed.task):
        print(line)


def _predict(args: argparse.Namespace) -> int:
    from deq_zoo.printing import show_results

    out = _out_folder(args, "predictions")
    model, preset = _open(args)
    results = preset.task.predict(model, args.files, out)
    return show_results(results, out, _listing("predictions"), args.json)


def _sample(args: argparse.Namespace) -> int:
    from deq_zoo.help import format_sampling
    from deq_zoo.loading import open_preset
    from deq_zoo.printing import show_results
    from deq_zoo.settings import with_settings

    options = open_preset(args.run)[1].task.sampling()
    if args.list:
        print(format_sampling(options))
        return 0
    options = with_settings(options, _as_settings(args.others, options))
    out = _out_folder(args, "samples")
    model, preset = _open(args)
    results = preset.task.sample(model, options, out)
    return show_results(results, out, _listing("samples"), args.json)


def _out_folder(args: argparse.Namespace, default: str) -> OutFolder:
    """Return the folder for results; raise if their listing would replace a file."""
    out = OutFolder(args.out or Path(default), args.force, asked=args.out is not None)
    if out.asked:
        out.check([_listing(default)])
    return out


def _listing(folder: str) -> str:
    """Return the name of the file that lists all results in a folder."""
    return f"{folder}.jsonl"


def _as_settings(words: Sequence[str], options: Any) -> list[str]:
    """Return `--scale 4`, `--scale=4` and `scale=4` as `scale=4`.

    Args:
        words: from the command line.
        options: the options of sampling, which the words should name.
    """
    from deq_zoo.settings import walk

    flags = {f"--{field.path.replace('_', '-')}" for field in walk(options)}
    settings = []
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        flag = f"--{name.removeprefix('--').replace('_', '-')}"
        if not equals and not word.startswith("-"):
            raise ZooError(f"options of sampling read --name value or name=value, got {word!r}")
        if flag not in flags:
            raise ZooError(f"unknown option {flag!r}{suggest(flag, flags | _SAMPLE_FLAGS)}")
        if not equals:
            following = next(rest, None)
            if following is None:
                raise ZooError(f"{word} needs a value")
            value = following
        settings.append(f"{flag.removeprefix('--').replace('-', '_')}={value}")
    return settings


def _convert(args: argparse.Namespace) -> None:
    from deq_zoo.building import try_to_build
    from deq_zoo.convert import convert_file, export_file
    from deq_zoo.preset import find_preset

    if args.to_authors == (args.preset is not None):
        raise ZooError(
            "convert reads weights of the authors with --preset NAME, or writes weights of ours in "
            "their layout with --to-authors --out FILE"
        )
    if args.to_authors and args.out is None:
        raise ZooError("--to-authors needs --out FILE, which ends with .safetensors or .pth")
    out = args.out or args.file.with_suffix(".safetensors")
    if out.exists() and not args.force:
        raise ZooError(f"{out} exists already: choose another --out, or replace it with --force")
    if args.to_authors:
        count, key = export_file(args.file, out, best=not args.last), ""
    else:
        preset = _with_changes(find_preset(args.preset), args)
        try_to_build(preset)
        count, key = convert_file(args.file, preset, args.preset, out, args.key)
    print(f"{count} tensors{f' of {key!r}' if key else ''} written to {out}")


def _report(args: argparse.Namespace) -> None:
    from deq_zoo.report import write_report
    from deq_zoo.run import Run

    run = Run.open(args.run)
    preset = run.preset()
    write_report(run, preset if args.data_dir is None else preset.with_data_dir(args.data_dir))
    print(run.report)


_COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "list": _list,
    "info": _info,
    "train": _train,
    "evaluate": _evaluate,
    "predict": _predict,
    "sample": _sample,
    "report": _report,
    "convert": _convert,
}
