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
from typing import TYPE_CHECKING

from deq_zoo.command_line import parse_arguments
from deq_zoo.errors import ZooError
from deq_zoo.packages import install
from deq_zoo.predictions import OutFolder, listing, results_folder
from deq_zoo.standard_streams import drop_unwritten, open_streams

if TYPE_CHECKING:
    from deq_zoo.model import Model
    from deq_zoo.preset import Preset

_NEEDS = f"needs packages of the zoo: {install('zoo')}, or the extra of one family"
_SHORT = ("epochs", "steps", "seed", "workers")  # settings of a preset with flags of their own


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; print a mistake of the user as one paragraph."""
    if argv is None:
        open_streams()
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    finally:
        drop_unwritten()


def _run(argv: Sequence[str]) -> int:
    try:
        args = parse_arguments(argv)
        code = int(_COMMANDS[args.command](args) or 0)
        print(end="", flush=True)  # an error of the stream belongs to the command
        return code
    except ZooError as error:
        print(f"deq-zoo: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("deq_zoo", "torchdeq"):
            raise
        print(f"deq-zoo: {error.name} is not installed; this command {_NEEDS}", file=sys.stderr)
    except BrokenPipeError:  # the reader of our output has gone
        return 1
    except OSError as error:
        print(f"deq-zoo: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("deq-zoo: interrupted", file=sys.stderr)
        return 130
    return 2


def _list(args: argparse.Namespace) -> None:
    from deq_zoo.catalogue import entries, pretrained_entries

    listed = (pretrained_entries if args.pretrained else entries)(args.family)
    if args.json:
        print(json.dumps([entry._asdict() for entry in listed], indent=1))
        return
    for entry in listed:
        print(entry)


def _info(args: argparse.Namespace) -> None:
    from deq_zoo.catalogue import describe_preset, preset_info
    from deq_zoo.preset import PRESETS, find_preset
    from deq_zoo.pretrained import names, pretrained_card

    if args.name in names() and args.name not in PRESETS:
        card = pretrained_card(args.name)
        print(card.to_json() if args.json else card.to_markdown(), end="")
        return
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
    if args.launch is not None:
        from deq_zoo.launch import check_launch, launch, without_launch

        check_launch(args.launch, args.cpu, os.environ)
        if args.launch > 1:
            return launch(without_launch(args.words), args.launch)
    from deq_zoo.printing import show_training
    from deq_zoo.training import train_changed

    result = train_changed(
        args.name,
        lambda preset: _with_changes(preset, args),
        out=args.out,
        resume=args.resume,
        force=args.force,
        quiet=args.quiet or args.json,
        cpu=args.cpu,
        max_seconds=args.max_seconds,
        report=not args.no_report,
    )
    return show_training(result, args.json)


def _open(args: argparse.Namespace) -> tuple[Model, Preset]:
    """Return the model that the command line names, on its device, and its preset."""
    import torch

    from deq_zoo.loading import check_last, open_model

    check_last(args.run, args.last)
    model, preset = open_model(args.run, best=not args.last, data_dir=args.data_dir)
    accelerator = None if args.cpu else torch.accelerator.current_accelerator(check_available=True)
    return model.to(torch.device("cpu") if accelerator is None else accelerator), preset


def _evaluate(args: argparse.Namespace) -> None:
    from deq_zoo.evaluate import evaluate
    from deq_zoo.evaluation_settings import (
        check_evaluation_settings,
        check_same_data,
        rebuild,
    )
    from deq_zoo.log import as_json
    from deq_zoo.precision import autocast
    from deq_zoo.printing import describe_evaluation, evaluation_as_data

    model, preset = _open(args)
    changed = _with_changes(preset, args)
    check_evaluation_settings(preset, changed, vars(args), args.split)
    if args.data_dir is not None:
        check_same_data(model, preset, args.data_dir)
    if changed != preset:
        model = rebuild(model, changed, str(args.run))
    if args.split == "val" and changed.task.val_set is None:
        raise ZooError(f"{args.run} has no validation data: use --split test")
    with autocast(changed.precision, model.device):  # as the evaluations of training
        evaluation = evaluate(changed.task, model, args.split, thorough=True)
    if args.json:
        print(as_json(evaluation_as_data(evaluation, args.split)))
        return
    for line in describe_evaluation(evaluation, changed.task):
        print(line)


def _predict(args: argparse.Namespace) -> int:
    from deq_zoo.printing import show_results

    out = results_folder(args.out, args.force, "predictions")
    model, preset = _open(args)
    results = preset.task.predict(model, args.files, out)
    return show_results(results, out, listing("predictions"), args.json)


def _sample(args: argparse.Namespace) -> int:
    from deq_zoo.family_options import parse_family_options
    from deq_zoo.help import format_options
    from deq_zoo.loading import open_preset
    from deq_zoo.printing import show_results

    options = open_preset(args.run)[1].task.sampling()
    if args.list:
        print(format_options(options))
        return 0
    options = parse_family_options(options, args.others, args.flags)
    out = results_folder(args.out, args.force, "samples")
    model, preset = _open(args)
    results = preset.task.sample(model, options, out)
    return show_results(results, out, listing("samples"), args.json)


def _check_free(out: Path, force: bool) -> None:
    """Raise `ZooError` if a file to write exists and may not be replaced."""
    if out.exists() and not force:
        raise ZooError(f"{out} exists already: choose another --out, or replace it with --force")


def _convert(args: argparse.Namespace) -> None:
    from deq_zoo.convert import convert_file, export_file
    from deq_zoo.loading import check_last
    from deq_zoo.preset import find_preset

    if args.to_authors == (args.preset is not None):
        raise ZooError(
            "convert reads weights of the authors with --preset NAME, or writes weights of ours in "
            "their layout with --to-authors --out FILE"
        )
    if args.to_authors and args.out is None:
        raise ZooError("--to-authors needs --out FILE, which ends with .safetensors or .pth")
    out = args.out or args.file.with_suffix(".safetensors")
    if out.resolve() == args.file.resolve():
        raise ZooError(f"{args.file} would be overwritten: choose another file with --out")
    _check_free(out, args.force)
    if args.to_authors:
        check_last(args.file, args.last)
        count, key = export_file(args.file, out, best=not args.last), ""
    else:
        preset = _with_changes(find_preset(args.preset), args)
        count, key = convert_file(args.file, preset, args.preset, out, args.key)
    if args.json:
        print(json.dumps({"out": str(out), "tensors": count, "key": key}))
    else:
        print(f"{count} tensors{f' of {key!r}' if key else ''} written to {out}")


def _serve(args: argparse.Namespace) -> int:
    from deq_zoo.loading import open_preset
    from deq_zoo.pretrained import is_pretrained
    from deq_zoo.serving.command import check_packages, serve
    from deq_zoo.serving.limits import Limits

    check_packages()
    limits = Limits(
        slots=args.slots, queue=args.queue, max_bytes=args.max_bytes, time_limit=args.time_limit
    )
    name = str(args.run) if is_pretrained(args.run) else open_preset(args.run)[0]
    return serve(_open(args)[0], name, limits, args.host, args.port)


def _report(args: argparse.Namespace) -> None:
    from deq_zoo.pretrained import FOLDER, is_pretrained
    from deq_zoo.report import write_report
    from deq_zoo.run import Run
    from deq_zoo.saved_model import is_saved_model

    if is_saved_model(args.run):
        raise ZooError(f"{args.run} is a saved model: a report needs the log of a run folder")
    if is_pretrained(args.run):
        card = FOLDER / f"{args.run}.md"
        raise ZooError(
            f"{args.run} is a pretrained model: runs have reports, it has a card, {card}"
        )
    run = Run.open(args.run)
    preset = run.preset()
    write_report(run, preset if args.data_dir is None else preset.with_data_dir(args.data_dir))
    print(json.dumps({"report": str(run.report)}) if args.json else run.report)


def _export(args: argparse.Namespace) -> int:
    from deq_zoo.exporting import SUFFIXES, write_export
    from deq_zoo.family_options import parse_family_options
    from deq_zoo.help import format_options
    from deq_zoo.loading import check_last, open_model, open_preset
    from deq_zoo.pretrained import is_pretrained

    check_last(args.run, args.last)
    options = open_preset(args.run)[1].task.exporting()
    if args.list:
        print(format_options(options))
        return 0
    options = parse_family_options(options, args.others, args.flags)
    folder = args.run if args.run.is_dir() else args.run.parent
    stem = args.run.name if is_pretrained(args.run) else "model"
    out = args.out or folder / f"{stem}{SUFFIXES[args.format]}"
    _check_free(out, args.force)
    model, preset = open_model(args.run, best=not args.last, data_dir=args.data_dir)
    exportable = preset.task.export(model, options)
    for path in write_export(exportable, preset.task.deq, args.solver, args.format, out):
        print(path)
    return 0


def _doctor(args: argparse.Namespace) -> None:
    from deq_zoo.doctor import draw, examine_model
    from deq_zoo.log import as_json

    out = None if args.out is None else OutFolder(args.out, args.force)
    if out is not None:
        out.check(["doctor.jsonl"])
    lines = []
    for examined in examine_model(*_open(args), args.seconds):
        lines.append(as_json({"layer": examined.solve.name, **examined.diagnosis.as_data()}))
        if args.json:
            print(lines[-1])
        else:
            examined.diagnosis.show()
        if out is not None:
            for picture in draw(examined):
                out.write(f"{picture.name}.png", picture.png)
    if out is not None:
        out.write("doctor.jsonl", "".join(f"{line}\n" for line in lines))


_COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "list": _list,
    "info": _info,
    "train": _train,
    "evaluate": _evaluate,
    "predict": _predict,
    "sample": _sample,
    "serve": _serve,
    "report": _report,
    "export": _export,
    "doctor": _doctor,
    "convert": _convert,
}
